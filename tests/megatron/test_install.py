"""The door for programs written for Megatron: aliases, and nothing behind them twice."""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from harness.program import run

import shardwise.megatron
from shardwise import parallel_state, tensor_parallel
from shardwise.errors import ConfigError
from shardwise.megatron import datasets, distributed, layer_specs, module, tokenizers, utils
from shardwise.megatron.config import ModelParallelConfig, TransformerConfig
from shardwise.megatron.models import language_module
from shardwise.megatron.models.bert import BertModel
from shardwise.megatron.models.embedding import LanguageModelEmbedding
from shardwise.megatron.models.gpt import GPTModel
from shardwise.megatron.schedules import get_forward_backward_func


@pytest.fixture
def installed():
    shardwise.megatron.install()
    yield
    shardwise.megatron.uninstall()
    assert not [name for name in sys.modules if name.partition(".")[0] == "megatron"]


@pytest.mark.usefixtures("installed")
def test_imports_of_every_kind_find_the_same_objects():
    import megatron.core.parallel_state as ps
    import megatron.core.tensor_parallel.layers
    from megatron.core import ModelParallelConfig as TheirConfig
    from megatron.core import mpu
    from megatron.core.models.bert.bert_model import BertModel as TheirBert
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding as TheirEmbedding
    from megatron.core.models.common.language_module import language_module as theirs
    from megatron.core.models.gpt.gpt_model import GPTModel as TheirGPT
    from megatron.core.pipeline_parallel import get_forward_backward_func as theirs_of_package
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func as theirs_of_module
    from megatron.core.tensor_parallel.mappings import _CopyToModelParallelRegion
    from megatron.core.transformer.transformer_config import TransformerConfig as TheirTransformerConfig

    assert ps is parallel_state
    assert mpu is parallel_state
    assert megatron.core.tensor_parallel is tensor_parallel
    assert megatron.core.tensor_parallel.layers is sys.modules["shardwise.tensor_parallel.layers"]
    assert megatron.core.utils is utils
    assert TheirConfig is ModelParallelConfig
    assert TheirTransformerConfig is TransformerConfig
    assert theirs is language_module
    assert (TheirGPT, TheirBert, TheirEmbedding) == (GPTModel, BertModel, LanguageModelEmbedding)
    assert theirs_of_package is theirs_of_module is get_forward_backward_func
    assert _CopyToModelParallelRegion is tensor_parallel.mappings._CopyToModelParallelRegion


@pytest.mark.usefixtures("installed")
def test_packages_that_name_what_their_modules_hold():
    import megatron.core.distributed as theirs
    from megatron import mpu
    from megatron.core import dist_checkpointing
    from megatron.core.datasets.gpt_dataset import MockGPTDataset
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tokenizers import MegatronTokenizer
    from megatron.core.transformer.module import MegatronModule
    from megatron.initialize import initialize_megatron
    from megatron.mpu.initialize import get_tensor_model_parallel_rank

    # A function with the name of its module.
    assert theirs.finalize_model_grads is finalize_model_grads is distributed.finalize_model_grads
    assert theirs.DistributedDataParallel is distributed.DistributedDataParallel
    assert dist_checkpointing.ShardedTensor is ShardedTensor
    assert (MockGPTDataset, MegatronTokenizer) == (datasets.MockGPTDataset, tokenizers.MegatronTokenizer)
    assert (MegatronModule, get_gpt_layer_local_spec) == (module.MegatronModule, layer_specs.get_gpt_layer_local_spec)
    # Megatron-DeepSpeed's package has what Megatron has in two, and layers of its own.
    assert mpu is shardwise.megatron.mpu
    assert mpu.get_tensor_model_parallel_rank is get_tensor_model_parallel_rank
    assert get_tensor_model_parallel_rank is parallel_state.get_tensor_model_parallel_rank
    assert (
        mpu.ColumnParallelLinear
        is mpu.layers.ColumnParallelLinear
        is sys.modules["megatron.mpu.layers"].ColumnParallelLinear
    )
    assert mpu.broadcast_data is mpu.data.broadcast_data is tensor_parallel.broadcast_data
    assert mpu.divide is utils.divide
    assert initialize_megatron is shardwise.megatron.initialize.initialize_megatron


@pytest.mark.usefixtures("installed")
def test_a_second_call_changes_nothing():
    before = {name: module for name, module in sys.modules.items() if name.startswith("megatron")}
    shardwise.megatron.install()
    assert {name: module for name, module in sys.modules.items() if name.startswith("megatron")}.keys() == before.keys()
    assert sys.modules["megatron.core.utils"] is utils


@pytest.mark.usefixtures("installed")
def test_what_is_not_offered_is_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"megatron\.core\.optimizer"):
        importlib.import_module("megatron.core.optimizer")


def test_the_real_one_is_not_replaced(monkeypatch):
    real = ModuleType("megatron.core")
    monkeypatch.setitem(sys.modules, "megatron.core", real)
    with pytest.raises(ConfigError, match=r"megatron\.core is already imported; call shardwise\.megatron\.install"):
        shardwise.megatron.install()
    assert sys.modules["megatron.core"] is real
    assert "megatron" not in sys.modules


@pytest.mark.slow
def test_the_example_of_the_guide_runs():
    guide = (Path(__file__).parents[2] / "docs" / "porting.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    (example,) = [example for example in examples if "megatron.install()" in example]
    run("-W", "error", "-c", example)
