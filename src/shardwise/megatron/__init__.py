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

from shardwise.errors import ConfigError

_PACKAGES = (
    "megatron",
    "megatron.core",
    "megatron.core.datasets",
    "megatron.core.dist_checkpointing",
    "megatron.core.distributed",
    "megatron.core.models",
    "megatron.core.models.bert",
    "megatron.core.models.common",
    "megatron.core.models.common.embeddings",
    "megatron.core.models.common.language_module",
    "megatron.core.models.gpt",
    "megatron.core.pipeline_parallel",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.tokenizers",
    "megatron.core.tokenizers.text",
    "megatron.core.tokenizers.text.libraries",
    "megatron.core.transformer",
    "megatron.mpu",
)

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
    "megatron.core.models.bert.bert_model": "shardwise.megatron.models.bert",
    "megatron.core.models.common.embeddings.language_model_embedding": "shardwise.megatron.models.embedding",
    "megatron.core.models.common.language_module.language_module": "shardwise.megatron.models.language_module",
    "megatron.core.models.gpt.gpt_layer_specs": "shardwise.megatron.layer_specs",
    "megatron.core.models.gpt.gpt_model": "shardwise.megatron.models.gpt",
    "megatron.core.parallel_state": "shardwise.parallel_state",
    "megatron.core.process_groups_config": "shardwise.megatron.process_groups_config",
    "megatron.core.tensor_parallel": "shardwise.tensor_parallel",
    "megatron.core.tensor_parallel.cross_entropy": "shardwise.tensor_parallel.cross_entropy",
    "megatron.core.tensor_parallel.data": "shardwise.tensor_parallel.data",
    "megatron.core.tensor_parallel.inference_layers": "shardwise.tensor_parallel.inference_layers",
    "megatron.core.tensor_parallel.layers": "shardwise.tensor_parallel.layers",
    "megatron.core.tensor_parallel.mappings": "shardwise.tensor_parallel.mappings",
    "megatron.core.tensor_parallel.random": "shardwise.tensor_parallel.random",
    "megatron.core.tensor_parallel.utils": "shardwise.tensor_parallel.utils",
    "megatron.core.tokenizers.megatron_tokenizer": "shardwise.megatron.tokenizers",
    "megatron.core.tokenizers.text.libraries.null_tokenizer": "shardwise.megatron.tokenizers",
    "megatron.core.transformer.module": "shardwise.megatron.module",
    "megatron.core.transformer.transformer_config": "shardwise.megatron.config",
    "megatron.core.utils": "shardwise.megatron.utils",
    "megatron.mpu.cross_entropy": "shardwise.tensor_parallel.cross_entropy",
    "megatron.mpu.data": "shardwise.tensor_parallel.data",
    "megatron.mpu.initialize": "shardwise.parallel_state",
    "megatron.mpu.layers": "shardwise.tensor_parallel.layers",
    "megatron.mpu.mappings": "shardwise.tensor_parallel.mappings",
    "megatron.mpu.random": "shardwise.tensor_parallel.random",
    "megatron.mpu.utils": "shardwise.tensor_parallel.utils",
}

_SCHEDULES: dict[str, tuple[str, str | None]] = {
    "get_forward_backward_func": ("shardwise.megatron.schedules", "get_forward_backward_func"),
}


def _names_of(module: str, *names: str) -> dict[str, tuple[str, str | None]]:
    return {name: (module, name) for name in names}


# Names that a package itself has, besides its modules: package -> name -> where it is.
_NAMES: dict[str, dict[str, tuple[str, str | None]]] = {
    "megatron.core": {
        "ModelParallelConfig": ("shardwise.megatron.config", "ModelParallelConfig"),
        # Megatron's own second name.
        "mpu": ("shardwise.parallel_state", None),
    },
    "megatron.core.dist_checkpointing": _names_of(
        "shardwise.megatron.dist_checkpointing",
        "LocalNonpersistentObject",
        "ShardedObject",
        "ShardedTensor",
        "check_is_distributed_checkpoint",
        "load",
        "load_common_state_dict",
        "load_content_metadata",
        "save",
    ),
    "megatron.core.distributed": _names_of(
        "shardwise.megatron.distributed",
        "DistributedDataParallel",
        "DistributedDataParallelConfig",
        "finalize_model_grads",
    ),
    "megatron.core.models.bert": {"BertModel": ("shardwise.megatron.models.bert", "BertModel")},
    "megatron.core.models.gpt": {"GPTModel": ("shardwise.megatron.models.gpt", "GPTModel")},
    "megatron.core.pipeline_parallel": _SCHEDULES,
    "megatron.core.pipeline_parallel.schedules": _SCHEDULES,
    "megatron.core.tokenizers": _names_of("shardwise.megatron.tokenizers", "MegatronTokenizer"),
    "megatron.core.transformer": {
        "MegatronModule": ("shardwise.megatron.module", "MegatronModule"),
        "TransformerConfig": ("shardwise.megatron.config", "TransformerConfig"),
    },
}

# Megatron-DeepSpeed's one package for what Megatron has in two: every name of both.
_MERGED = {"megatron.mpu": ("shardwise.parallel_state", "shardwise.tensor_parallel")}

_MARK = "__shardwise__"


def install() -> None:
    """Let ``megatron.core`` and its modules name Shardwise's; a second call changes nothing.

    Raises:
        ConfigError: Megatron itself, or another package of its name, is imported already; nothing has changed.
    """
    foreign = sorted(
        name for name in sys.modules if name.partition(".")[0] == "megatron" and not _is_ours(sys.modules[name])
    )
    if foreign:
        raise ConfigError(
            f"{', '.join(foreign[:3])}{' and others are' if len(foreign) > 3 else ' is'} already imported; call "
            "shardwise.megatron.install() before anything imports megatron"
        )
    modules: dict[str, ModuleType] = {}
    for name in _PACKAGES:
        package = ModuleType(name, "An alias of Shardwise; see shardwise.megatron.")
        # A package without a folder: what is not offered is not found, even where Megatron is installed.
        package.__path__ = []
        setattr(package, _MARK, True)
        for source in map(importlib.import_module, _MERGED.get(name, ())):
            vars(package).update({public: getattr(source, public) for public in source.__all__})
        for attribute, (where, member) in _NAMES.get(name, {}).items():
            source = importlib.import_module(where)
            setattr(package, attribute, source if member is None else getattr(source, member))
        modules[name] = package
    for name, target in _ALIASES.items():
        modules[name] = importlib.import_module(target)
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        # A function may have the name of the module that it is in.
        if parent in _PACKAGES and child not in _NAMES.get(parent, {}):
            setattr(modules[parent], child, module)
    sys.modules.update(modules)


def uninstall() -> None:
    """Take the aliases back; modules that imported them keep what they have."""
    for name in (*_PACKAGES, *_ALIASES):
        if name in sys.modules and _is_ours(sys.modules[name]):
            del sys.modules[name]


def _is_ours(module: ModuleType) -> bool:
    return getattr(module, _MARK, False) or module.__name__.partition(".")[0] == "shardwise"
