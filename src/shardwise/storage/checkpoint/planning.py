"""What torch.distributed.checkpoint is given of a state: its tensors by key, whatever the names of its entries."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from shardwise.core.errors import CheckpointError
from shardwise.core.sharding import ParamShard, TensorPieces


def tensors_of(
    state: Mapping[str, ParamShard], stored_shapes: Mapping[str, Sequence[int]] | None = None
) -> dict[str, TensorPieces]:
    """This rank's pieces of each tensor, by key; those of entries that share a key are together.

    Entries that share key and memory, such as tied weights, are one.

    Args:
        state: entries that agree about each tensor (see ``describe_state``).
        stored_shapes: the tensors' shapes in the checkpoint that is to be loaded, for entries that allow another.

    Raises:
        CheckpointError: two entries would be the same part of one tensor.
        ShardingError: the rank holds an index of a tensor twice.
    """
    pieces: dict[str, dict[tuple[int, ...], Tensor]] = {}
    written: dict[str, dict[tuple[int, ...], Tensor]] = {}
    first: dict[str, ParamShard] = {}
    for name, shard in state.items():
        first.setdefault(shard.key, shard)
        written.setdefault(shard.key, {}).update(shard.written_pieces())
        of_key = pieces.setdefault(shard.key, {})
        for offset, view in shard.pieces():
            held = of_key.setdefault(offset, view)
            if (held.data_ptr(), held.shape, held.stride()) != (view.data_ptr(), view.shape, view.stride()):
                raise CheckpointError(
                    f"entry {name!r} and one before it are both the part of tensor {shard.key!r} at {list(offset)}; "
                    "give them different keys or sharded_offsets"
                )
    shapes = stored_shapes or {key: shard.global_shape for key, shard in first.items()}
    return {
        key: TensorPieces(
            shapes[key],
            list(of_key.items()),
            dtype=first[key].dtype,
            device=first[key].device,
            written=list(written[key].items()),
        )
        for key, of_key in pieces.items()
    }
