"""Layouts, each with recomputation: the losses and the last weights are those of one rank, and settings work."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import pytest
from harness.groups import from_first_rank
from harness.parity import assert_close_to
from run.tiny_layouts import assert_relative, losses_of, state_of, trainer_of, whole_weights
from torch import Tensor

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.sharding import balanced_sizes
from shardwise.core.sharding.balanced import local_rows
from shardwise.run.settings import ParallelSettings, RecomputeSettings
from shardwise.training.trainer import Trainer

LENGTH = 10
BOUNDS = {"float64": 1e-10, "float32": 1e-5}


class Case(NamedTuple):
    """A layout, what it recomputes, and the optimizer.

    Attributes:
        in_fp32: also run in fp32. Not "gpt", of whose keys' biases the gradient is 0 in truth and rounding in fact.
    """

    parallel: ParallelSettings
    recompute: RecomputeSettings
    optimizer: str
    architecture: str = "llama"
    in_fp32: bool = False

    @property
    def num_layers(self) -> int:
        """Two, or one for each part of the pipeline."""
        return max(2, self.parallel.pp * self.parallel.virtual_stages)


P = ParallelSettings
PAIRS, FIRST = RecomputeSettings("full", num_layers=2), RecomputeSettings("full", method="block", num_layers=1)
MLP, PARTS = (
    RecomputeSettings("selective", modules=modules) for modules in (("mlp",), ("core_attn", "layernorm", "mlp"))
)
INTERLEAVED_PARTS = P(tp=2, pp=2, sequence_parallel=True, pipeline_schedule="interleaved", virtual_stages=2)
CASES = {
    1: [Case(P(), PAIRS, "muon")],
    2: [
        Case(P(zero=1), PARTS, "muon"),
        Case(P(fsdp=True), PAIRS, "muon", in_fp32=True),
        Case(P(tp=2, sequence_parallel=True), FIRST, "adamw", "gpt"),
        Case(P(tp=2), PARTS, "adamw", "gpt"),
        Case(P(pp=2, pipeline_schedule="zero-bubble"), MLP, "adamw", in_fp32=True),
        Case(P(pp=2, pipeline_schedule="gpipe"), FIRST, "adamw", "gpt"),
        Case(P(pp=2), PAIRS, "adamw"),
    ],
    4: [
        Case(P(tp=2, sequence_parallel=True, zero=1), MLP, "muon", in_fp32=True),
        Case(P(tp=2, sequence_parallel=True, fsdp=True), PARTS, "adamw", "gpt"),
        Case(P(pp=2, pipeline_schedule="interleaved", virtual_stages=2, fsdp=True), PAIRS, "adamw"),
        Case(INTERLEAVED_PARTS, MLP, "adamw", "gpt"),
        Case(P(pp=4), PARTS, "adamw"),
    ],
    8: [Case(P(tp=2, pp=2, sequence_parallel=True, zero=1), PAIRS, "muon")],
}


@pytest.mark.slow
@pytest.mark.ranks(1, 2, 4, 8)
@pytest.mark.parametrize(
    ("dtype", "steps"),
    [
        ("float64", 12),
        pytest.param("float64", 50, marks=pytest.mark.matrix),
        pytest.param("float32", 50, marks=pytest.mark.matrix),
    ],
)
def test_steps_are_those_of_one_rank(group, tmp_path, dtype, steps):
    references: dict[tuple[str, int, str], tuple[Tensor, dict[str, Tensor]]] = {}
    for case in CASES[group.size()]:
        if dtype == "float32" and not case.in_fp32:
            continue
        model = {"num_layers": case.num_layers, "sequence_length": LENGTH, "num_query_groups": 2}
        model["architecture"] = case.architecture
        options = {"dtype": dtype, "model": model, "optimizer": {"name": case.optimizer}}
        kind = case.optimizer, case.num_layers, case.architecture
        if kind not in references:
            alone = trainer_of(tmp_path, **options)
            ran = (losses_of(alone, steps), whole_weights(alone)) if group.rank() == 0 else None
            references[kind] = from_first_rank(ran)
        expected, weights = references[kind]
        assert expected[-1] < expected[0] - 0.5
        trainer = trainer_of(tmp_path, case.parallel, case.recompute, **options)
        assert_relative(losses_of(trainer, steps), expected, BOUNDS[dtype], str(case))
        heads = trainer._chunks[0].config.heads
        for key, weight in whole_weights(trainer).items():
            found, wanted = (without_biases_of_keys(key, each, heads) for each in (weight, weights[key]))
            assert_close_to(found, wanted, rtol_of_norm=BOUNDS[dtype], name=f"{key}: {case}")
        if dtype == "float64":
            assert_at_work(trainer, case, steps, sum(weight.numel() for weight in weights.values()))


def without_biases_of_keys(name: str, whole: Tensor, heads: tuple[int, int, int]) -> Tensor:
    """A parameter, with 0 for biases of keys: their true gradient is 0, and AdamW scales the rounding error up."""
    if not name.endswith("linear_qkv.bias"):
        return whole
    num_heads, num_groups, head_dim = heads
    by_group = whole.view(num_groups, num_heads // num_groups + 2, head_dim).clone()
    by_group[:, -2] = 0
    return by_group.flatten()


def assert_at_work(trainer: Trainer, case: Case, steps: int, num_elements: int) -> None:
    """One more step, in which each setting of the case shows in what is held, called and sent."""
    parallel, name = case.parallel, str(case)
    chunks, tp, dp = trainer._chunks, trainer.tp_group, trainer.dp_group.size()
    layers = [layer for chunk in chunks for layer in chunk.decoder.layers]
    calls: Counter[str] = Counter()
    lengths = set()

    def counted(what: str) -> Any:
        return lambda *_: calls.update([what])

    for layer in layers:
        layer.mlp.register_forward_pre_hook(counted("mlp"))
        layer.register_forward_pre_hook(lambda _, inputs: lengths.add(inputs[0].size(0)))
    with CollectiveCounter() as counter:
        losses_of(trainer, 1, first=steps)
    num_calls = len(layers) * trainer.settings.training.global_batch_size // dp
    num_calls //= trainer.settings.micro_batch_size(dp)
    sent = Counter(launch.name for launch in counter.launches)
    num_bytes: Counter[str] = Counter()
    for launch in counter.launches:
        num_bytes[launch.name] += launch.num_bytes

    # Recomputation: the MLP of each layer, or of the first, runs twice.
    again = {FIRST: num_calls // len(layers)}.get(case.recompute, num_calls)
    assert calls["mlp"] == num_calls + again, name
    # Stages have some of the layers each; tensor-parallel ranks a part of these, of sizes that divide little.
    assert len(layers) == case.num_layers // parallel.pp, name
    held = sum(param.numel() for chunk in chunks for param in chunk.parameters())
    assert held < num_elements * (1.3 / parallel.tp if parallel.tp > 1 else 1.01), name
    shards = balanced_sizes(LENGTH, parallel.tp if parallel.sequence_parallel else 1)
    assert lengths == {shards[tp.rank() % len(shards)]}, name
    if parallel.tp > 1:
        # Attention and MLP, forward and back.
        moves = ("all_gather", "reduce_scatter") if parallel.sequence_parallel else ("all_reduce",)
        assert all(sent[move] >= 4 * num_calls for move in moves), name
    state = state_of(trainer)
    kept = {key: shard.data.numel() for key, shard in state.items() if key.startswith("optimizer.")}
    assert any(".momentum." in key for key in kept) == (case.optimizer == "muon"), name
    # Muon's matrices travel between ranks that share them out, however they do it.
    assert (sent["all_to_all"] > 0) == (case.optimizer == "muon" and dp * parallel.tp > 1), name
    rows = sum(local_rows(param).numel() for chunk in chunks for param in chunk.parameters())
    assert rows < (0.6 * held if parallel.fsdp else held + 1), name
    if parallel.fsdp or parallel.zero:
        # State is split over the data-parallel ranks, and gradients are scattered to where they are used.
        assert sum(kept.values()) < 0.6 * 2 * held, name
        assert num_bytes["reduce_scatter"] >= 0.9 * held * 8, name
        assert num_bytes["all_gather"] >= 0.9 * held * 8 / 2, name
