"""What data-parallel ranks share out with ``zero``: how large the buffers are, and what each rank owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.run.plan.parameters import Parameter
from shardwise.run.plan.workload import Mesh, Workload
from shardwise.training.gradients.bucket import DEFAULT_BUCKET_SIZE
from shardwise.training.gradients.bucket_bounds import place


@dataclass(frozen=True)
class Shares:
    """Buffers of gradients, after which parameters lie too.

    Attributes:
        scattered: elements, padding included, whose sums go to their owners.
        whole: elements, padding included, whose sums go to every rank, as they are summed over other ranks too.
        owned: by data-parallel rank, elements without padding.
        matrices: by data-parallel rank, those of matrices.
    """

    scattered: int
    whole: int
    owned: tuple[int, ...]
    matrices: tuple[int, ...]


def shares_of(workload: Workload, mesh: Mesh, params: Sequence[Parameter]) -> Shares:
    """Of a rank with the parameters ``params``."""
    owned, matrices = [0] * mesh.dp, [0] * mesh.dp
    ends = []
    for is_whole in (False, True):
        # As the buffers have them: the last first.
        indices = [
            index
            for index in reversed(range(len(params)))
            if is_summed_elsewhere(workload, mesh, params[index]) is is_whole
        ]
        if not indices:
            ends.append(0)
            continue
        placement = place(
            [params[index].numel for index in indices], bucket_size=DEFAULT_BUCKET_SIZE, world_size=mesh.dp
        )
        ends.append(placement.bounds[-1])
        for number, places in enumerate(placement.buckets):
            first = placement.bounds[number]
            size = (placement.bounds[number + 1] - first) // mesh.dp
            for each in places:
                param, start = params[indices[each]], placement.starts[each] - first
                stop = start + param.numel
                for rank in range(start // size, -(-stop // size)) if size else ():
                    count = min(stop, (rank + 1) * size) - max(start, rank * size)
                    owned[rank] += count
                    matrices[rank] += count if param.is_matrix else 0
    return Shares(ends[0], ends[1], tuple(owned), tuple(matrices))


def is_summed_elsewhere(workload: Workload, mesh: Mesh, param: Parameter) -> bool:
    """Whether a gradient is summed over tensor-parallel ranks or stages, beside the data-parallel ranks."""
    if mesh.tp > 1 and (param.is_of_heads or param.num_shared or (param.is_partial and mesh.splits_sequence)):
        return True
    return mesh.pp > 1 and is_tied(workload, param)


def is_tied(workload: Workload, param: Parameter) -> bool:
    """Whether it is a weight that embedding and output layer have in common."""
    is_embedding = param.name == "embedding.word_embeddings.weight"
    return param.is_copy or (workload.model.share_embeddings_and_output_weights and is_embedding)
