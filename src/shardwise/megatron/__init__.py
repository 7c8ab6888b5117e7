"""A door for programs written for Megatron: ``import megatron.core...`` finds this library.

::

    import shardwise.megatron

    shardwise.megatron.install()
    from megatron.core import parallel_state, tensor_parallel

Aliases only: ``megatron.core.parallel_state`` *is* ``shardwise.parallel_state``. What is not offered is not found, as
in any package without such a module; ``docs/porting.md`` says what that is, and why.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from shardwise.core.errors import ConfigError

_ALIASES = {
    "megatron.core.datasets.blended_megatron_dataset_builder": "shardwise.megatron.datasets",
    "megatron.core.datasets.blended_megatron_dataset_config": "shardwise.megatron.datasets",
    "megatron.core.datasets.gpt_dataset": "shardwise.megatron.datasets",
    "megatron.core.datasets.utils": "shardwise.megatron.datasets",
    "megatron.core.dist_checkpointing.core": "shardwise.megatron.dist_checkpointing",
    "megatron.core.dist_checkpointing.mapping": "shardwise.megatron.dist_checkpointing",
    "megatron.core.dist_checkpointing.serialization": "shardwise.megatron.dist_checkpointing",
    "megatron.core.dist_checkpointing.validation": "shardwise.megatron.dist_checkpointing",
    "megatron.core.distributed.distributed_data_parallel": "shardwise.megatron.distributed",
    "megatron.core.distributed.distributed_data_parallel_config": "shardwise.megatron.distributed",
    "megatron.core.distributed.finalize_model_grads": "shardwise.megatron.distributed",
    "megatron.core.model_parallel_config": "shardwise.megatron.config",
    # Megatron's own second name of parallel_state.
    "megatron.core.mpu": "shardwise.parallel_state",
    "megatron.core.models.bert.bert_model": "shardwise.megatron.models.bert",
    "megatron.core.models.common.embeddings.language_model_embedding": "shardwise.megatron.models.embedding",
    "megatron.core.models.common.language_module.language_module": "shardwise.megatron.models.language_module",
    "megatron.core.models.gpt.gpt_layer_specs": "shardwise.megatron.layer_specs",
    "megatron.core.models.gpt.gpt_model": "shardwise.megatron.models.gpt",
    "megatron.core.parallel_state": "shardwise.parallel_state",
    "megatron.core.process_groups_config": "shardwise.megatron.process_groups_config",
    "megatron.core.tensor_parallel": "shardwise.tensor_parallel",
    "megatron.core.tokenizers.megatron_tokenizer": "shardwise.megatron.tokenizers",
    "megatron.core.tokenizers.text.libraries.null_tokenizer": "shardwise.megatron.tokenizers",
    "megatron.core.transformer.module": "shardwise.megatron.module",
    "megatron.core.transformer.transformer_config": "shardwise.megatron.config",
    "megatron.core.utils": "shardwise.megatron.utils",
    "megatron.initialize": "shardwise.megatron.initialize",
    "megatron.mpu": "shardwise.megatron.mpu",
    "megatron.mpu.cross_entropy": "shardwise.tensor_parallel.cross_entropy",
    "megatron.mpu.data": "shardwise.tensor_parallel.data",
}

_ALIASES |= {
    f"megatron.core.tensor_parallel.{name}": f"shardwise.tensor_parallel.{name}"
    for name in ("cross_entropy", "data", "inference_layers", "layers", "mappings", "random", "utils")
}

# What a layer is made of, and small modules besides: by module here, those of ``megatron.core``.
_ALIASES |= {
    f"megatron.core.{name}": f"shardwise.megatron.{module}"
    for module, names in {
        "enums": "enums transformer.enums",
        "layer_parts": "fusions.fused_bias_dropout fusions.fused_layer_norm transformer.attention transformer.mlp "
        "transformer.dot_product_attention transformer.torch_norm",
        "models.bert": "models.bert.bert_lm_head models.bert.pooler",
        "num_microbatches_calculator": "num_microbatches_calculator",
        "optimizer": "optimizer",
        "p2p_communication": "pipeline_parallel.p2p_communication",
        "packed_seq_params": "packed_seq_params",
        "rotary_pos_embedding": "models.common.embeddings.rope_utils models.common.embeddings.rotary_pos_embedding",
        "spec_utils": "transformer.identity_op transformer.spec_utils",
        "symmetric_exchanges": "inference.communication.torch_symm_triton",
        "transformer_layer": "transformer.transformer_layer",
        "utils": "transformer.utils",
    }.items()
    for name in names.split()
}

_ALIASES |= {
    f"megatron.mpu.{name}": f"shardwise.megatron.mpu.{name}"
    for name in ("initialize", "layers", "mappings", "random", "utils")
}

# Packages that have names themselves, besides their modules: all that these offer.
_OFFERED = {
    "megatron.core": ("shardwise.megatron.config", "shardwise.megatron.distributed"),
    "megatron.core.dist_checkpointing": ("shardwise.megatron.dist_checkpointing",),
    "megatron.core.distributed": ("shardwise.megatron.distributed",),
    "megatron.core.models.bert": ("shardwise.megatron.models.bert",),
    "megatron.core.models.gpt": ("shardwise.megatron.models.gpt",),
    "megatron.core.pipeline_parallel": ("shardwise.megatron.schedules",),
    "megatron.core.pipeline_parallel.schedules": ("shardwise.megatron.schedules",),
    "megatron.core.tokenizers": ("shardwise.megatron.tokenizers",),
    "megatron.core.transformer": tuple(
        f"shardwise.megatron.{name}" for name in ("config", "module", "spec_utils", "transformer_layer")
    ),
}

# All that another name lies in.
_PACKAGES = sorted(
    {*_OFFERED}
    | {name[:end] for name in (*_ALIASES, *_OFFERED) for end, sign in enumerate(name) if sign == "."} - _ALIASES.keys()
)

_MARK = "__shardwise__"


def install(*, rng: str = "global") -> None:
    """Let ``megatron.core`` and its modules name Shardwise's; a second call changes nothing else.

    Args:
        rng: what ``model_parallel_cuda_manual_seed`` takes where the program says nothing: "global", by which dropout's
            masks, and so the losses, are the same at every number of tensor-parallel ranks and stages; or "per_rank",
            as in Megatron, by which each rank draws its own, in less time.

    Raises:
        ConfigError: ``rng`` is neither; or Megatron itself, or another package of its name, is imported already.
            Nothing has changed.
    """
    foreign = sorted(
        name for name in sys.modules if name.partition(".")[0] == "megatron" and not _is_ours(sys.modules[name])
    )
    if foreign:
        raise ConfigError(
            f"{', '.join(foreign[:3])}{' and others are' if len(foreign) > 3 else ' is'} already imported; call "
            "shardwise.megatron.install() before anything imports megatron"
        )
    set_default_rng = importlib.import_module("shardwise.tensor_parallel.random").set_default_rng
    set_default_rng(rng)
    modules: dict[str, ModuleType] = {}
    for name in _PACKAGES:
        package = ModuleType(name, "An alias of Shardwise; see shardwise.megatron.")
        # A package without a folder: what is not offered is not found, even where Megatron is installed.
        package.__path__ = []
        setattr(package, _MARK, True)
        for source in map(importlib.import_module, _OFFERED.get(name, ())):
            vars(package).update({public: getattr(source, public) for public in source.__all__})
        modules[name] = package
    for name, target in _ALIASES.items():
        modules[name] = importlib.import_module(target)
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        # A function may have the name of the module that it is in.
        if parent in _PACKAGES and not hasattr(modules[parent], child):
            setattr(modules[parent], child, module)
    sys.modules.update(modules)


def uninstall() -> None:
    """Take the aliases and the default of ``rng`` back; modules that imported them keep what they have."""
    importlib.import_module("shardwise.tensor_parallel.random").set_default_rng("per_rank")
    for name in (*_PACKAGES, *_ALIASES):
        if name in sys.modules and _is_ours(sys.modules[name]):
            del sys.modules[name]


def _is_ours(module: ModuleType) -> bool:
    return getattr(module, _MARK, False) or module.__name__.partition(".")[0] == "shardwise"
