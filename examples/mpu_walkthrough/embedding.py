"""An embedding table split over the vocabulary, step by step.

    torchrun --nproc-per-node 4 examples/mpu_walkthrough/embedding.py

Each rank looks up the ids that it holds, and has zeros for the others; the sum over the tensor-parallel group is what
one table would have given.
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
    """What a rank sees on the way.

    Attributes:
        first, last: ids that it holds, ``last`` excluded.
        table: ``[last - first, hidden]``, its rows.
        is_mine: ``[b, s]``, which ids it holds.
        local_ids: ``[b, s]``, their rows in its table; 0 for the others.
        partial: ``[b, s, hidden]``, its rows, and zeros for the others.
        reduced: ``[b, s, hidden]``, the sum over the ranks.
        layer_output: the same from ``VocabParallelEmbedding`` itself.
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
    """``[vocabulary, hidden]``: as one rank would have it; the row of id i is i.0, i.1, i.2."""
    return torch.arange(VOCABULARY)[:, None] + torch.arange(HIDDEN) / 10


def experiment() -> Lookup:
    """Look ``IDS`` up, by hand and by the layer."""
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
    """The rank's part of the print-out."""
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
