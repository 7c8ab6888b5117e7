"""Table of the aliases of the door's modules: Megatron's names, and short names in this library.

A module has its path in Megatron, or the path of the package that has its names there. ``install`` defines Megatron's
names. Short names can always be imported. An alias is the same module object.
"""

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_CORE = "shardwise.megatron.core"

# Columns: module below ``shardwise.megatron.core``; its short names below ``shardwise``, or "-"; its names below
# ``megatron.core``, where "=" is its own path and ".name" is a name below that path.
_TABLE = """
checkpoint_strategies - dist_checkpointing.strategies.torch dist_checkpointing.strategies.fully_parallel
datasets megatron.datasets .gpt_dataset .utils .blended_megatron_dataset_builder .blended_megatron_dataset_config
datasets - .blended_dataset .indexed_dataset
dist_checkpointing megatron.dist_checkpointing .core .serialization .validation
distributed megatron.distributed .distributed_data_parallel .distributed_data_parallel_config .finalize_model_grads
distributed - .fsdp .fsdp.mcore_fsdp_adapter .torch_fully_sharded_data_parallel
distributed - .torch_fully_sharded_data_parallel_config
enums megatron.enums = transformer.enums
extensions - extensions.transformer_engine transformer.custom_layers.transformer_engine
functions - jit activations fusions.fused_bias_gelu fusions.fused_bias_swiglu fusions.fused_bias_geglu
functions - fusions.fused_softmax
inference - inference.contexts inference.contexts.base_context inference.contexts.static_context
inference - inference_params
models megatron.models
models.language_module megatron.models.embedding models.common.language_module.language_module
models.language_module - models.common.embeddings.language_model_embedding
models.transformer_models megatron.models.bert models.bert.bert_lm_head models.bert.bert_model models.bert.pooler
models.transformer_models megatron.models.gpt models.gpt.gpt_model
models.rotary_pos_embedding megatron.rotary_pos_embedding models.common.embeddings.rotary_pos_embedding
models.rotary_pos_embedding - models.common.embeddings.rope_utils
models.vision - models.common.vision_module.vision_module models.vision.multimodal_projector
num_microbatches_calculator megatron.num_microbatches_calculator =
optimizer megatron.optimizer .optimizer .distrib_optimizer
optimizer_config - optimizer.optimizer_config optimizer.grad_scaler
optimizer_param_scheduler - =
packed_seq_params megatron.packed_seq_params =
parallel_state parallel_state = mpu
parallel_state.groups parallel_state.dense,parallel_state.experts
parallel_state.ambient parallel_state.initialize,parallel_state.memory
pipeline_parallel.schedules megatron.schedules,megatron.p2p_communication pipeline_parallel.p2p_communication
pipeline_parallel.stages - pipeline_parallel.utils
process_groups_config megatron.process_groups_config =
services - config config_logger fp8_utils msc_utils package_info typed_torch
sharded_entries - dist_checkpointing.mapping dist_checkpointing.utils
state_dicts - dist_checkpointing.dict_utils
symmetric_exchanges megatron.symmetric_exchanges inference.communication.torch_symm_triton
tensor_parallel tensor_parallel =
tensor_parallel.attributes tensor_parallel.private_names
tensor_parallel.cross_entropy - =
tensor_parallel.data - =
tensor_parallel.inference_layers - =
tensor_parallel.layers tensor_parallel.column,tensor_parallel.embedding,tensor_parallel.row =
tensor_parallel.mappings tensor_parallel.regions =
tensor_parallel.random tensor_parallel.recomputation =
tensor_parallel.utils - =
timers - =
tokenizers megatron.tokenizers .megatron_tokenizer .text.libraries.null_tokenizer
transformer.layer_parts megatron.layer_parts transformer.attention transformer.dot_product_attention transformer.mlp
transformer.layer_parts - transformer.torch_norm transformer.torch_layer_norm
transformer.layer_parts - fusions.fused_bias_dropout fusions.fused_layer_norm
transformer.moe megatron.moe .moe_layer .router .experts
transformer.multi_token_prediction - = transformer.moe.moe_utils
transformer.pipeline_parallel_layer_layout - =
transformer.router_replay - transformer.moe.router_replay
transformer.module megatron.module,megatron.spec_utils = transformer.spec_utils transformer.identity_op
transformer.transformer_block - =
transformer.transformer_config megatron.config = model_parallel_config
transformer.transformer_layer megatron.transformer_layer,megatron.layer_specs = models.gpt.gpt_layer_specs
transformer.transformer_layer - models.bert.bert_layer_specs
utils megatron.utils = transformer.utils
"""
_ROWS = [row.split() for row in _TABLE.strip().splitlines()]

SHORT = {f"shardwise.{short}": f"{_CORE}.{row[0]}" for row in _ROWS for short in row[1].split(",") if short != "-"}
# `from shardwise.tensor_parallel import regions` looks up the name below the package's full path.
_NAMES = SHORT | {
    f"{_CORE}{short.removeprefix('shardwise')}": target
    for short, target in SHORT.items()
    if short.startswith(("shardwise.parallel_state.", "shardwise.tensor_parallel."))
}


def _whole(name: str, module: str) -> str:
    own = {"=": module, ".": module + name}
    return f"megatron.core.{own.get(name[0], name)}"


MEGATRON = {_whole(name, module): f"{_CORE}.{module}" for module, _, *names in _ROWS for name in names}
MEGATRON |= {
    f"megatron.{name}": f"shardwise.megatron.{name}"
    for name in ("initialize", "mpu", "mpu.initialize", "mpu.layers", "mpu.mappings", "mpu.random", "mpu.utils")
}
# The null tokenizer of older examples, unless the rest of its package is installed.
TRAINING = "megatron.training"
MEGATRON[f"{TRAINING}.tokenizer.tokenizer"] = f"{_CORE}.tokenizers"
MEGATRON |= {f"megatron.mpu.{name}": f"{_CORE}.tensor_parallel.{name}" for name in ("cross_entropy", "data")}

# Megatron's packages that define names themselves, with the modules here that have these names.
PACKAGES = {
    f"megatron.{package}": tuple(f"{_CORE}.{module}" for module in modules.split())
    for package, modules in {
        "core": "transformer.transformer_config distributed inference services timers",
        "core.dist_checkpointing": "dist_checkpointing sharded_entries",
        "core.distributed": "distributed",
        "core.models.bert": "models.transformer_models",
        "core.models.common.embeddings": "models.rotary_pos_embedding models.language_module",
        "core.models.gpt": "models.transformer_models",
        "core.optimizer": "optimizer",
        "core.pipeline_parallel": "pipeline_parallel.schedules",
        "core.pipeline_parallel.schedules": "pipeline_parallel.schedules",
        "core.tokenizers": "tokenizers",
        "core.transformer": "transformer.transformer_config transformer.module transformer.transformer_layer",
    }.items()
}


class _ShortNames(MetaPathFinder, Loader):
    """Importer of the short names of modules and of their submodules; it returns the modules themselves."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith("shardwise."):
            return None
        start = name
        while start not in _NAMES:
            start = start.rpartition(".")[0]
            if not start:
                return None
        return ModuleSpec(name, self, loader_state=_NAMES[start] + name[len(start) :])

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(spec.loader_state)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system replaced the module's spec by that of the short name.
        module.__spec__ = module.__spec__ and module.__spec__.loader_state


FINDER = _ShortNames()
# First in the list, because a package's folder also has the modules below its short name.
sys.meta_path.insert(0, FINDER)
