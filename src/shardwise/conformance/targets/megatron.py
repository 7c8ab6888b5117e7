"""Target ``megatron``: Megatron Core itself, if it is importable, on CPU ranks.

Megatron's calls of ``torch.cuda.current_device()`` as a device get the CPU; nothing else is changed. What needs a GPU
in Megatron is not offered: its optimizers and norms, its random streams and its pipeline messages.
"""

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.conformance.dense import IGNORED, Batch, Sizes, backward_of_mean, num_labels
from shardwise.conformance.dense_comparison import Called, Synchronised, joined, summed
from shardwise.conformance.targets.megatron_names import config_fields, from_megatron, make_layer, to_megatron
from shardwise.core.topology import Groups

versions: dict[str, str] = {}
# Its loss and its rotary positions are computed in fp32.
precision = torch.float32
one_draw = few_kv_heads = True


def prepare() -> None:
    _module("parallel_state")
    versions["megatron-core"] = importlib.metadata.version("megatron-core")
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]


def _module(name: str) -> Any:
    return importlib.import_module(f"megatron.core.{name}")


def start(groups: Groups) -> None:
    pp = 1 if groups.pp is None else groups.pp.size()
    _module("parallel_state").initialize_model_parallel(groups.tp.size(), pp)
    # The streams of the other tracker are a GPU's. Dropout is off wherever this one is used.
    _module("tensor_parallel.random").initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)


def stop() -> None:
    if _module("parallel_state").model_parallel_is_initialized():
        _module("parallel_state").destroy_model_parallel()


def _config(weight: Tensor, groups: Groups, sequence_length: int | None = None) -> Any:
    return _module("model_parallel_config").ModelParallelConfig(
        tensor_model_parallel_size=groups.tp.size(),
        sequence_parallel=sequence_length is not None,
        params_dtype=weight.dtype,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )


def _own(whole: Tensor, param: Any, groups: Groups) -> Tensor:
    """Return this rank's part of a parameter, by the attributes that Megatron sets."""
    if not getattr(param, "tensor_model_parallel", False):
        return whole
    stride = getattr(param, "partition_stride", 1)
    sections = whole.chunk(stride, param.partition_dim)
    parts = [each.chunk(groups.tp.size(), param.partition_dim)[groups.tp.rank()] for each in sections]
    return torch.cat(parts, param.partition_dim)


def _joined(own: Tensor, param: Any, groups: Groups) -> Tensor:
    """Return the whole tensor of the ranks' parts; for a replicated parameter, this rank's tensor."""
    if not getattr(param, "tensor_model_parallel", False):
        return own.clone()
    stride, dim = getattr(param, "partition_stride", 1), param.partition_dim
    parts = [each.chunk(stride, dim) for each in joined(own, dim, groups.tp).chunk(groups.tp.size(), dim)]
    return torch.cat([part[section] for section in range(stride) for part in parts], dim)


def _set(module: nn.Module, wholes: Mapping[str, Any], groups: Groups) -> None:
    with torch.no_grad():
        for name, param in module.named_parameters():
            param.copy_(_own(wholes[name], param, groups))


def _layer(kind: str, shape: Sequence[int], config: Any, groups: Groups, **options: Any) -> Any:
    options |= {"config": config, "init_method": nn.init.normal_, "tp_group": groups.tp}
    return make_layer(_module("tensor_parallel.layers"), kind, shape, **options)


def column_linear(
    weight: Tensor,
    bias: Tensor | None,
    groups: Groups,
    *,
    gather_output: bool = False,
    skip_bias_add: bool = False,
    sequence_length: int | None = None,
) -> nn.Module:
    config = _config(weight, groups, sequence_length)
    options: dict[str, Any] = {"bias": bias is not None, "skip_bias_add": skip_bias_add}
    layer = _layer("column", weight.shape, config, groups, gather_output=gather_output, **options)
    _set(layer, {"weight": weight, "bias": bias}, groups)
    return Called(layer, lambda x: layer(x) if skip_bias_add else layer(x)[0])


def row_linear(
    weight: Tensor,
    bias: Tensor | None,
    groups: Groups,
    *,
    input_is_parallel: bool = True,
    skip_bias_add: bool = False,
    sequence_length: int | None = None,
) -> nn.Module:
    config = _config(weight, groups, sequence_length)
    options: dict[str, Any] = {"bias": bias is not None, "skip_bias_add": skip_bias_add}
    layer = _layer("row", weight.shape, config, groups, input_is_parallel=input_is_parallel, **options)
    _set(layer, {"weight": weight, "bias": bias}, groups)
    return Called(layer, lambda x: layer(x) if skip_bias_add else layer(x)[0])


def norm(weight: Tensor, bias: Tensor, groups: Groups) -> nn.Module:
    layer: Any = nn.LayerNorm(weight.numel(), dtype=weight.dtype)
    for param, value in ((layer.weight, weight), (layer.bias, bias)):
        param.data.copy_(value)
        param.sequence_parallel = True
    layer.config = _config(weight, groups, 1)
    return layer  # type: ignore[no-any-return]


def embedding(weight: Tensor, groups: Groups, *, sequence_length: int | None = None) -> nn.Module:
    reduces = sequence_length is not None
    config = _config(weight, groups, sequence_length)
    layer = _layer("embedding", weight.shape, config, groups, reduce_scatter_embeddings=reduces)
    _set(layer, {"weight": weight}, groups)
    layer.config = _config(weight, groups)
    return Called(layer, layer)


def cross_entropy(
    logits: Tensor, labels: Tensor, groups: Groups, *, vocab: int, label_smoothing: float = 0.0
) -> Tensor:
    function = _module("tensor_parallel.cross_entropy").vocab_parallel_cross_entropy
    result: Tensor = function(logits, labels, label_smoothing)
    return result


def _mapping(name: str) -> Callable[[Tensor, Groups], Tensor]:
    def move(tensor: Tensor, groups: Groups) -> Tensor:
        result: Tensor = getattr(_module("tensor_parallel.mappings"), name)(tensor)
        return result

    return move


copy = _mapping("copy_to_tensor_model_parallel_region")
reduce = _mapping("reduce_from_tensor_model_parallel_region")
gather_sequence = _mapping("gather_from_sequence_parallel_region")
scatter_sequence = _mapping("scatter_to_sequence_parallel_region")
reduce_scatter_sequence = _mapping("reduce_scatter_to_sequence_parallel_region")


def finalize_gradients(module: nn.Module, groups: Groups) -> None:
    finalize = _module("distributed.finalize_model_grads")._allreduce_non_tensor_model_parallel_grads
    inner: Any = getattr(module, "inner", module)
    config = inner.config
    if not hasattr(config, "qk_layernorm"):
        config.qk_layernorm = False
    chunk: Any = module
    chunk.ddp_config = SimpleNamespace(use_megatron_fsdp=False)
    finalize([chunk], config, groups.tp)


def _whole_of(module: Any, groups: Groups, tensor_of: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    inner = getattr(module, "inner", module)
    wholes = {name: _joined(tensor_of(param), param, groups) for name, param in inner.named_parameters()}
    return from_megatron(wholes, inner.case_sizes) if hasattr(inner, "case_sizes") else wholes


def whole_gradients(module: nn.Module, groups: Groups) -> dict[str, Tensor]:
    return _whole_of(module, groups, lambda param: torch.zeros_like(param) if param.grad is None else param.grad)


def whole_parameters(module: nn.Module, groups: Groups) -> dict[str, Tensor]:
    return _whole_of(module, groups, lambda param: param.detach())


def data_parallel(module: nn.Module, groups: Groups) -> Synchronised:
    distributed = _module("distributed")
    config = _module("transformer.transformer_config").TransformerConfig(
        num_layers=1, hidden_size=4, num_attention_heads=1, use_cpu_initialization=True
    )
    settings = distributed.DistributedDataParallelConfig(overlap_grad_reduce=False)
    ddp = distributed.DistributedDataParallel(config, settings, module)

    def finish() -> None:
        ddp.finish_grad_sync()
        for param in module.parameters():
            wrapped: Any = param
            param.grad = wrapped.main_grad.clone()

    return Synchronised(ddp, ddp.no_sync, finish)


def language_model(sizes: Sizes, weights: dict[str, Tensor], groups: Groups) -> nn.Module:
    config = _module("transformer.transformer_config").TransformerConfig(
        **config_fields(sizes),
        tensor_model_parallel_size=groups.tp.size(),
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        attention_softmax_in_fp32=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
    spec = _module("models.gpt.gpt_layer_specs").get_gpt_layer_local_spec(
        qk_layernorm=sizes.qk_norm, normalization="RMSNorm"
    )
    model = _module("models.gpt.gpt_model").GPTModel(
        config,
        spec,
        sizes.vocab,
        64,
        position_embedding_type="rope",
        rotary_base=int(sizes.base),
        share_embeddings_and_output_weights=sizes.tied,
    )
    model.double()
    _set(model, to_megatron(weights, sizes), groups)
    model.case_sizes = sizes

    def call(ids: Tensor, labels: Tensor) -> Tensor:
        b, s = ids.shape
        later = torch.ones(1, 1, s, s, dtype=torch.bool).triu(1).expand(b, -1, -1, -1)
        positions = torch.arange(s).expand(b, -1)
        losses: Tensor = model(ids, positions, later, labels=labels.clamp(min=0))
        # A program of Megatron's masks the losses.
        return losses * (labels != IGNORED)

    return Called(model, call)


def accumulate(model: nn.Module, batches: Sequence[Batch], groups: Groups) -> Tensor:
    assert groups.dp is not None
    total = backward_of_mean(model, batches, num_labels(batches, groups))
    for param in model.parameters():
        if groups.dp.size() > 1 and param.grad is not None:
            dist.all_reduce(param.grad, group=groups.dp)
    finalize_gradients(model, groups)
    return summed(total, groups.dp)


def seed(seed: int, groups: Groups) -> None:
    torch.manual_seed(seed)


def initial(kind: str, rows: int, columns: int, groups: Groups) -> Tensor:
    layer = _layer(kind, (rows, columns), _config(torch.empty(0), groups), groups)
    return whole_parameters(layer, groups)["weight"]
