"""Small functions of Megatron's ``utils`` and ``transformer.utils``."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import ProcessGroup

from shardwise.core import initialization
from shardwise.core.communication.context import GlobalMemoryBuffer as GlobalMemoryBuffer, default_device
from shardwise.core.communication.symmetric_memory import GlobalSymmetricMemoryBuffer as GlobalSymmetricMemoryBuffer
from shardwise.core.errors import ShardingError
from shardwise.core.sequence_view import ContextShard
from shardwise.core.sharded_state import sharded_state_dict
from shardwise.core.sharding import ParamLayout, ParamShard, ShardedOffset, is_copy_by
from shardwise.megatron.absent import absent_names
from shardwise.megatron.core import parallel_state, program_utils
from shardwise.megatron.core.dist_checkpointing import ShardedObject
from shardwise.megatron.core.program_utils import *  # noqa: F403
from shardwise.megatron.core.tensor_parallel import attributes, linear_functions
from shardwise.megatron.errors import AssertedShardingError
from shardwise.megatron.surface import offer

__getattr__ = absent_names("utils", "transformer.utils")

_T = TypeVar("_T")

init_method_normal = initialization.init_method_normal
scaled_init_method_normal = initialization.scaled_init_method_normal
divide, ensure_divisibility = attributes.divide, attributes.ensure_divisibility
drain_embedding_wgrad_compute = linear_functions.drain_embedding_wgrad_compute


def get_pg_size(group: ProcessGroup | None = None) -> int:
    """Number of ranks in ``group``; 1 for None, or if ``torch.distributed`` is not initialised."""
    return 1 if group is None or not dist.is_initialized() else group.size()


def get_pg_rank(group: ProcessGroup | None = None) -> int:
    """This rank's index in ``group``; 0 for None, or if ``torch.distributed`` is not initialised."""
    return 0 if group is None or not dist.is_initialized() else group.rank()


def get_pg_src_rank(group: ProcessGroup | None = None) -> int:
    """Global rank of the first rank of ``group``; 0 for None, or if ``torch.distributed`` is not initialised."""
    return 0 if group is None or not dist.is_initialized() else dist.get_process_group_ranks(group)[0]


def is_torch_min_version(version: str, check_equality: bool = True) -> bool:
    """True if PyTorch's version is ``version`` or later; without ``check_equality``, only if it is later."""
    return torch.__version__ >= version if check_equality else torch.__version__ > version


def is_te_min_version(version: str, check_equality: bool = True) -> bool:
    """Return False, because Transformer Engine is not used even if it is installed."""
    return False


def get_batch_on_this_cp_rank(batch: dict[str, Any], cp_group: ProcessGroup | None = None) -> dict[str, Any]:
    """Replace the tensors of a batch by the positions of this context-parallel rank, in-place, and return the batch.

    Args:
        batch: tensors ``[b, s]``, and ``"attention_mask"`` ``[b, 1, s, keys]``; None stays None.
        cp_group: context-parallel group; the ambient one if None.

    Raises:
        AssertedShardingError: the length is not a multiple of twice the number of ranks.
    """
    group = parallel_state.get_context_parallel_group() if cp_group is None else cp_group
    assert group is not None
    if group.size() == 1:
        return batch
    for name, whole in batch.items():
        if whole is None:
            continue
        dim = 2 if name == "attention_mask" else 1
        length = whole.size(dim)
        if length % (2 * group.size()):
            raise AssertedShardingError(
                f"{name} has {length} positions along dimension {dim}, which {2 * group.size()} does not divide: each "
                f"of {group.size()} context-parallel ranks has two runs; pad the sequences"
            )
        batch[name] = ContextShard(length, group).own(whole, dim=dim)
    return batch


def get_tensor_model_parallel_group_if_none(
    tp_group: ProcessGroup | None, is_expert: bool = False, check_initialized: bool = True
) -> ProcessGroup | None:
    """Return ``tp_group``, or the ambient tensor-parallel group if it is None.

    Args:
        tp_group: a group, or None.
        is_expert: whether to default to the expert-tensor-parallel group.
        check_initialized: whether to raise, instead of returning None, if there is no group.

    Raises:
        TopologyError: no group is given and none is initialised.
    """
    ambient = parallel_state.get_tensor_model_parallel_group
    if is_expert:
        ambient = parallel_state.get_expert_tensor_parallel_group
    return ambient(check_initialized) if tp_group is None else tp_group


def make_tp_sharded_tensor_for_checkpoint(
    tensor: Tensor,
    key: str,
    tp_axis: int = 0,
    replica_id: Any = None,
    prepend_offsets: Sequence[ShardedOffset] = (),
    *,
    allow_shape_mismatch: bool = False,
    tp_group: ProcessGroup | None = None,
    dp_cp_group: ProcessGroup | None = None,
    sizes: Sequence[int] | None = None,
) -> ParamShard:
    """Make the checkpoint entry of a tensor that is split over the tensor-parallel group.

    Args:
        tensor: this rank's part; not copied.
        key: name in the checkpoint.
        tp_axis: split dimension of ``tensor``.
        replica_id: no effect; layout and rank determine which copy is written.
        prepend_offsets: ``(axis, index, count)`` of leading axes that stack several tensors under one name.
        allow_shape_mismatch: whether the stored tensor may have another size along ``tp_axis`` when loading.
        tp_group: tensor-parallel group; the ambient one if None.
        dp_cp_group: group of ranks that hold the same part, whose first rank writes it; the planner chooses if None.
        sizes: every rank's size along ``tp_axis``; None means that all ranks have this rank's size.

    Raises:
        TopologyError: no group is given and none is initialised.
        ShardingError: ``sizes`` does not have one entry per rank, or contradicts this rank's size.
    """
    group = parallel_state.resolve_tensor_model_parallel_group(tp_group)
    t, rank = group.size(), group.rank()
    axis = tp_axis % tensor.dim()
    own = tensor.size(axis)
    sizes = (own,) * t if sizes is None else tuple(sizes)
    if len(sizes) != t or sizes[rank] != own:
        raise ShardingError(f"{key}: sizes {list(sizes)} do not fit {own} along dimension {axis} on rank {rank} of {t}")
    shape = [*tensor.shape[:axis], sum(sizes), *tensor.shape[axis + 1 :]]
    layout = ParamLayout.split(shape, axis, t, sizes=sizes)
    is_copy = is_copy_by({"dp_cp_group": dp_cp_group})
    return ParamShard(key, tensor, layout, rank, tuple(prepend_offsets), allow_shape_mismatch, is_copy)


def make_sharded_tensor_for_checkpoint(
    tensor: Tensor,
    key: str,
    prepend_offsets: Sequence[ShardedOffset] = (),
    replica_id: Any = None,
    *,
    allow_shape_mismatch: bool = False,
    tp_group: ProcessGroup | None = None,
    dp_cp_group: ProcessGroup | None = None,
) -> ParamShard:
    """Make the checkpoint entry of a tensor that every rank of the tensor-parallel group holds whole."""
    group = parallel_state.resolve_tensor_model_parallel_group(tp_group)
    layout = ParamLayout.replicated(tensor.shape, group.size())
    is_copy = is_copy_by({"dp_cp_group": dp_cp_group})
    return ParamShard(key, tensor, layout, group.rank(), tuple(prepend_offsets), allow_shape_mismatch, is_copy)


class MakeViewlessTensor(Function):
    """Autograd function of ``make_viewless_tensor``: the same memory and gradient, but not a view."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, requires_grad: bool) -> Tensor:
        return _same_memory(tensor, requires_grad)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return grad_output, None


def _same_memory(tensor: Tensor, requires_grad: bool) -> Tensor:
    result = torch.empty((1,), dtype=tensor.dtype, device=tensor.device, requires_grad=requires_grad)
    result.data = tensor.data
    return result


def make_viewless_tensor(inp: Tensor, requires_grad: bool, keep_graph: bool) -> Tensor:
    """Return a tensor that shares ``inp``'s memory but is not a view, so that setting its ``data`` frees the memory.

    Args:
        inp: any tensor; returned unchanged if it is not a view.
        requires_grad: ``requires_grad`` of the result.
        keep_graph: whether gradients flow to ``inp``.
    """
    if inp._base is None:
        return inp
    if keep_graph:
        viewless: Tensor = MakeViewlessTensor.apply(inp, requires_grad)
        return viewless
    return _same_memory(inp, requires_grad)


def assert_viewless_tensor(tensor: _T, extra_msg: str | None = None) -> _T:
    """Return ``tensor`` after checking that it, or any item of a list, is not a view; other objects pass.

    Raises:
        AssertedShardingError: a tensor is a view, whose base would keep the memory.
    """
    if isinstance(tensor, list):
        for item in tensor:
            assert_viewless_tensor(item, extra_msg)
    elif isinstance(tensor, Tensor) and tensor._base is not None:
        raise AssertedShardingError(
            f"a tensor of shape {list(tensor.shape)} is a view of one of shape {list(tensor._base.shape)}, which keeps "
            f"its memory; use make_viewless_tensor{'' if extra_msg is None else f'. {extra_msg}'}"
        )
    return tensor


def safely_set_viewless_tensor_data(tensor: Tensor, new_data_tensor: Tensor) -> None:
    """Set ``tensor.data`` in-place, after checking that this frees the old memory.

    Raises:
        AssertedShardingError: ``tensor`` is a view.
    """
    assert_viewless_tensor(tensor, f"its data was to be replaced by shape {list(new_data_tensor.shape)}")
    tensor.data = new_data_tensor


def get_linear_layer(
    rows: int, columns: int, init_method: Callable[[Tensor], Any], perform_initialization: bool = True
) -> nn.Linear:
    """Make a ``torch.nn.Linear(rows, columns)`` with a weight from ``init_method`` and a bias of zeros."""
    layer = nn.Linear(rows, columns)
    if perform_initialization:
        init_method(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def get_default_causal_mask(sq: int) -> Tensor:
    """Return bools ``[sq, sq]``, True where a token must not see another, on the computing device."""
    return get_sliding_window_causal_mask(sq, sq, (sq, 0))


def get_sliding_window_causal_mask(sq: int, skv: int, window_size: tuple[int, int]) -> Tensor:
    """Return bools ``[sq, skv]``, True where a query must not see a key; queries have the last positions of the keys.

    Args:
        sq: number of queries.
        skv: number of keys.
        window_size: numbers of positions that a query sees before and after itself.
    """
    device = default_device(dist.group.WORLD if dist.is_initialized() else None)
    keys = torch.arange(skv, device=device)
    queries = torch.arange(skv - sq, skv, device=device)[:, None]
    return (keys < queries - window_size[0]) | (keys > queries + window_size[1])


def attention_mask_func(attention_scores: Tensor, attention_mask: Tensor) -> Tensor:
    """Set the scores to -10000 where the mask is True, in-place, and return them."""
    return attention_scores.masked_fill_(attention_mask, -10000.0)


def gelu_impl(x: Tensor) -> Tensor:
    """Compute GELU with the tanh approximation."""
    return F.gelu(x, approximate="tanh")


openai_gelu = gelu_impl


def erf_gelu(x: Tensor) -> Tensor:
    """Compute GELU with the error function."""
    return F.gelu(x)


def is_layer_window_attention(
    window_size: tuple[int, int] | None, window_attn_skip_freq: int | list[int] | None, layer_number: int
) -> bool:
    """True if a layer, numbered from 1, has the window; see ``TransformerConfig.window_attn_skip_freq``."""
    if isinstance(window_attn_skip_freq, list):
        return bool(window_size and window_attn_skip_freq[layer_number - 1])
    return bool(window_size) and (window_attn_skip_freq is None or layer_number % window_attn_skip_freq != 0)


def ensure_metadata_has_dp_cp_group(metadata: dict[str, Any] | None) -> dict[str, Any]:
    """Add the ambient ``dp_cp_group`` to ``metadata`` in-place if missing, and return it; None gives a new dict."""
    metadata = {} if metadata is None else metadata
    if "dp_cp_group" not in metadata:
        metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return metadata


def sharded_state_dict_default(
    module: nn.Module,
    prefix: str = "",
    sharded_offsets: Sequence[ShardedOffset] = (),
    metadata: dict[str, Any] | None = None,
    tp_group: ProcessGroup | None = None,
) -> dict[str, ParamShard]:
    """Return ``module``'s own ``sharded_state_dict`` if it has one, otherwise its parameters as replicated tensors."""
    group = parallel_state.resolve_tensor_model_parallel_group(tp_group)
    return sharded_state_dict(module, prefix, sharded_offsets, ensure_metadata_has_dp_cp_group(metadata), group=group)


def make_sharded_object_for_checkpoint(
    obj: Any, key: str, sharded_offsets: Sequence[ShardedOffset] = (), replica_id: Any = None, **kwargs: Any
) -> ShardedObject:
    """Raise the ConfigError of ``ShardedObject``."""
    return ShardedObject(key, obj)


def make_sharded_tensors_for_checkpoint(
    state_dict: Mapping[str, Any],
    prefix: str,
    tensor_parallel_layers_axis_map: Mapping[str, int] | None = None,
    sharded_offsets: Sequence[ShardedOffset] = (),
    extra_state_suffix: str = "_extra_state",
    tp_group: ProcessGroup | None = None,
    dp_cp_group: ProcessGroup | None = None,
) -> dict[str, ParamShard]:
    """Make the checkpoint entries of a module's tensors.

    Args:
        state_dict: tensors by name; an extra state that is None is skipped.
        prefix: prefix of each name.
        tensor_parallel_layers_axis_map: for the names of split tensors, the dimension that tensor-parallel ranks split
            into equal parts; other tensors are whole on every rank.
        sharded_offsets: ``(axis, index, count)`` of leading axes that stack several tensors under one name.
        extra_state_suffix: suffix of the names of extra states.
        tp_group, dp_cp_group: tensor-parallel group, and group of ranks with the same tensors; ambient ones if None.

    Raises:
        ConfigError: an extra state that is not None.
    """
    options: dict[str, Any] = {"prepend_offsets": sharded_offsets, "tp_group": tp_group, "dp_cp_group": dp_cp_group}
    axes = tensor_parallel_layers_axis_map or {}
    entries: dict[str, ParamShard] = {}
    for name, tensor in state_dict.items():
        key = prefix + name
        if name.endswith(extra_state_suffix):
            if tensor is not None:
                make_sharded_object_for_checkpoint(tensor, key)
        elif name in axes:
            entries[key] = make_tp_sharded_tensor_for_checkpoint(tensor, key, axes[name], **options)
        else:
            entries[key] = make_sharded_tensor_for_checkpoint(tensor, key, **options)
    return entries


def prepare_input_tensors_for_wgrad_compute(grad_output: Tensor, all_gathered_input: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of a weight's gradient: contiguous, and flattened from ``[s, b, n]`` to ``[s * b, n]``."""
    if grad_output.dim() != 3:
        return grad_output.contiguous(), all_gathered_input.contiguous()
    return grad_output.contiguous().flatten(0, 1), all_gathered_input.contiguous().flatten(0, 1)


offer(
    globals(),
    program_utils,
    "GlobalMemoryBuffer GlobalSymmetricMemoryBuffer divide drain_embedding_wgrad_compute ensure_divisibility",
    "init_method_normal scaled_init_method_normal",
)
