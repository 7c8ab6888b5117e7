"""Megatron's datasets and their builder: the same samples as Megatron's, from its indexed files or mock documents."""

from shardwise.megatron.absent import absent_names
from shardwise.megatron.core.datasets import blended_dataset, config, gpt_dataset, indexed_dataset
from shardwise.megatron.core.datasets.blended_dataset import *  # noqa: F403
from shardwise.megatron.core.datasets.config import *  # noqa: F403
from shardwise.megatron.core.datasets.gpt_dataset import *  # noqa: F403
from shardwise.megatron.core.datasets.indexed_dataset import *  # noqa: F403
from shardwise.megatron.surface import offer

__getattr__ = absent_names("datasets.utils", "datasets.blended_megatron_dataset_config")

offer(globals(), blended_dataset, config, gpt_dataset, indexed_dataset)
