"""An embedding table split over the vocabulary, step by step.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 examples/mpu_walkthrough/embedding.py

Each rank looks up the ids that it holds, with zeros for the others. The sum over the tensor-parallel group equals the
lookup in one whole table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from by_rank import by_rank, four_ranks, print_once, row
from torch import Tensor, nn

from shardwise.megatron.config import ModelParallelConfig
from shardwise.tensor_parallel import VocabParallelEmbedding, reduce_from_tensor_model_parallel_region

# Seven ids on two ranks: four and three.
VOCABULARY, HIDDEN = 7, 3
IDS = torch.tensor([[0, 5, 3, 6]])


@dataclass(frozen=True)
class Lookup:
    """Intermediate results on one rank.

    Attributes:
        first, last: range of the ids that this rank holds, ``last`` excluded.
        table: ``[last - first, hidden]``, rows of these ids.
        is_mine: ``[b, s]``, True for ids that this rank holds.
        local_ids: ``[b, s]``, row of each of these ids in ``table``; 0 for other ids.
        partial: ``[b, s, hidden]``, looked-up rows; zeros for other ids.
        reduced: ``[b, s, hidden]``, sum of ``partial`` over the ranks.
        layer_output: ``[b, s, hidden]``, output of ``VocabParallelEmbedding``.
    """

    first: int
    last: int
    table: Tensor
    is_mine: Tensor
    local_ids: Tensor
    partial: Tensor
    reduced: Tensor
    layer_output: Tensor


def whole_table() -> Tensor:
    """Return the whole table, ``[vocabulary, hidden]``; the row of id i is i.0, i.1, i.2."""
    return torch.arange(VOCABULARY)[:, None] + torch.arange(HIDDEN) / 10


def experiment() -> Lookup:
    """Look up ``IDS`` step by step and with the layer."""
    layer = VocabParallelEmbedding(VOCABULARY, HIDDEN, init_method=nn.init.normal_, config=ModelParallelConfig())
    first, last = layer.vocab_start_index, layer.vocab_end_index
    with torch.no_grad():
        layer.weight.copy_(whole_table()[first:last])
    is_mine = (first <= IDS) & (last > IDS)
    local_ids = torch.where(is_mine, IDS - first, 0)
    partial = F.embedding(local_ids, layer.weight.detach()) * is_mine[..., None]
    return Lookup(
        first=first,
        last=last,
        table=layer.weight.detach(),
        is_mine=is_mine,
        local_ids=local_ids,
        partial=partial,
        reduced=reduce_from_tensor_model_parallel_region(partial),
        layer_output=layer(IDS).detach(),
    )


def lines(lookup: Lookup) -> list[str]:
    """Return this rank's lines of the output."""
    dense = nn.Embedding.from_pretrained(whole_table())
    equal = torch.equal(lookup.reduced, dense(IDS)) and torch.equal(lookup.layer_output, dense(IDS))
    rows = zip(IDS.flatten().tolist(), lookup.partial.view(-1, HIDDEN), lookup.reduced.view(-1, HIDDEN), strict=True)
    return [
        f"holds ids {lookup.first} to {lookup.last - 1} of {VOCABULARY}: a table of {list(lookup.table.shape)}",
        f"ids          {row(IDS)}",
        f"mine         {row(lookup.is_mine)}",
        f"row in table {row(lookup.local_ids)}",
        *(f"id {token}: my lookup {row(mine)}   summed {row(summed)}" for token, mine, summed in rows),
        f"equal to torch.nn.Embedding: {equal}",
    ]


def main() -> None:
    """Run on this rank."""
    with four_ranks():
        print_once(by_rank(lines(experiment())))


if __name__ == "__main__":
    main()
