"""A GPT whose ranks share the positions of each sample equals a GPT on one rank, under every mask."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness.live_bytes import LiveBytes
from models.model_checks import alone, check_gradients
from torch import Tensor
from torch.nn.attention.bias import CausalBias

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.errors import ConfigError, ShardingError
from shardwise.core.random import seed_streams
from shardwise.core.sequence_view import ContextShard
from shardwise.core.topology import Groups, Topology
from shardwise.kernels.planning import planning_for
from shardwise.models import GPT, Classification, Experts, ModelConfig, Recomputation
from shardwise.models.bert import Bert
from shardwise.models.generation import Sampling, generate
from shardwise.models.transformer import core_attention
from shardwise.models.transformer.heads import LatentAttention
from shardwise.models.transformer.masks import AttentionMask
from shardwise.models.transformer.moe import MoELayer
from shardwise.models.transformer.rotary import RotaryScaling
from shardwise.training.optimizer.gradients import finalize_gradients_, global_grad_norm

PAGE = Path(__file__).parents[2] / "docs" / "context.md"
VOCABULARY, BATCH = 97, 3
# Lengths that nothing divides, down to a position for each rank.
LENGTHS = (29, 4)
LEARNED: dict[str, Any] = {"position_embedding_type": "learned_absolute"}
# Options of the config, and of the model.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one key-value head": ({"num_query_groups": 1}, {}),
    "window": ({"window_size": (5, 0), "windowed_layers": (True, False)}, {}),
    "alibi": ({}, {"position_embedding_type": "alibi"}),
    "learned": ({"hidden_dropout": 0.2}, LEARNED),
    "soft cap": ({"attention_logit_softcap": 1.5, "window_size": (3, 0)}, LEARNED),
    "sinks": ({"attention_sinks": True, "window_size": (6, 0)}, {}),
    "latent": ({"latent": LatentAttention(9, plain_width=4, rotary_width=2, value_width=5, query_rank=7)}, {}),
    "scaling by length": ({}, {"rope_scaling": RotaryScaling("dynamic", 4.0, original_max_position_embeddings=8)}),
    "written out": ({"attention_backend": "local"}, {}),
    "recomputed": ({"recompute": Recomputation("selective", modules=("core_attn", "layernorm"))}, {}),
    "experts": ({"experts": Experts(num=8, per_token=2, ffn_hidden_size=22, aux_loss=0.1, z_loss=0.01)}, {}),
}
LAYOUTS = {
    2: ({"cp": 2},),
    3: ({"cp": 3},),
    4: ({"cp": 4}, {"cp": 2, "tp": 2, "sp": True}, {"cp": 2, "ep": 4, "etp": 1}),
}


def build(kind: str, groups: Groups, *, sequence_parallel: bool = False) -> GPT:
    own, options = KINDS[kind]
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 20, "num_attention_heads": 4, "kv_channels": 6}
    config = ModelConfig(
        **sizes | {"hidden_dropout": 0.0, "init_method_std": 0.2} | own,
        attention_dropout=0.0,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        params_dtype=torch.float64,
        sequence_parallel=sequence_parallel,
    )
    return GPT(config, VOCABULARY, 64, groups=groups, **{"position_embedding_type": "rope"} | options)


def batch_of(sample: int, length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(sample)
    ids = torch.randint(VOCABULARY, (BATCH, length), generator=generator)
    labels = ids.roll(-1, 1)
    # As many labels as the samples happen to have, and a sample of padding only.
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    labels[1] = -100
    return {"input_ids": ids, "labels": labels}


def masks(kind: str, batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """No mask; several documents in a row; padding on both sides; and any other mask."""
    ids = batch["input_ids"]
    length, places = ids.size(1), torch.arange(ids.size(1))
    starts = torch.tensor([[0, 3, 11], [0, 1, 2], [0, 9, 10]])
    documents = (places >= starts[..., None]).sum(1) - 1
    positions = places - starts.gather(1, documents)
    padding = ((places >= 2) & (places < max(3, length - 5))).expand(BATCH, -1).long()
    generator = torch.Generator().manual_seed(length)
    forbidden = torch.rand(BATCH, 1, length, length, generator=generator) < 0.2
    # Losses of padding have no meaning.
    padded = {"attention_mask": padding, "labels": batch["labels"].masked_fill(padding == 0, -100)}
    given = [{}, {"document_ids": documents}, {"attention_mask": forbidden}]
    # One rank moves padding to the end, so that dropout sees other tokens there.
    if kind != "learned":
        given.append(padded)
    if kind != "alibi":
        given.append({"document_ids": documents, "position_ids": positions})
    return given


def train(model: GPT, batches: list[dict[str, Tensor]], scale: float) -> list[Tensor]:
    """Losses of batches; gradients are those of their sum, with auxiliary losses, times ``scale``."""
    seed_streams(11, 0, rng="global")
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.loss_scale = scale
    losses = []
    for batch in batches:
        losses.append(model(**batch))
        (losses[-1].sum() * scale).backward()
    return [loss.detach() for loss in losses]


def check(kind: str, topology: Topology, length: int, *, sequence_parallel: bool = False) -> None:
    groups = Groups.of(topology)
    one = alone(topology)
    rank, number = groups.samples
    dense, split = build(kind, one), build(kind, groups, sequence_parallel=sequence_parallel)
    every = [batch_of(sample, length) for sample in range(number)]
    for given in masks(kind, every[0]):
        batches = [batch | given for batch in every]
        dense.zero_grad()
        split.zero_grad()
        expected = train(dense, batches if KINDS[kind][0].get("hidden_dropout", 0.0) == 0.0 else batches[:1], 0.5)
        (actual,) = train(split, [batches[rank]], 0.5)
        context = split.view_of(length).context
        assert context is not None
        torch.testing.assert_close(actual, context.own(expected[rank % len(expected)], dim=1), rtol=1e-10, atol=1e-10)
        finalize_gradients_(split, tp_group=groups.tp, dp_group=groups.dp, expert_dp_group=groups.expert_dp)
        check_gradients(split, dense, groups, atol=1e-11)
        norm = global_grad_norm(dense, tp_group=one.tp, groups=one)
        torch.testing.assert_close(
            global_grad_norm(split, tp_group=groups.tp, groups=groups), norm, rtol=1e-11, atol=0.0
        )


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_one_rank(group, kind):
    for sizes in LAYOUTS[group.size()]:
        options = dict(sizes)
        sequence_parallel = bool(options.pop("sp", False))
        if "ep" in options and kind != "experts":
            continue
        topology = Topology.create(**options)
        for length in LENGTHS:
            check(kind, topology, length, sequence_parallel=sequence_parallel)


@pytest.mark.ranks(2)
def test_keys_and_values_are_gathered_again_and_not_kept(group):
    own, whole = (length * BATCH * 2 * 6 * 8 for length in (ContextShard(29, group).size, 29))
    model, batch = build("one key-value head", Groups.of(Topology.create(cp=2))), batch_of(0, 29)
    # Tables of angles are kept from forward to forward.
    model(**batch)
    with CollectiveCounter() as counter, LiveBytes() as made:
        loss = model(**batch).sum()
        kept = made.count()
        loss.backward()
    assert [(each.name, each.num_bytes) for each in counter.launches] == [
        *[("all_gather", own)] * 2,
        *[("all_gather", own), ("reduce_scatter", whole)] * 2,
    ]
    with pytest.MonkeyPatch.context() as patch, LiveBytes() as made:
        patch.setattr(core_attention, "made_again", lambda whole, again: nullcontext())
        loss = model(**batch).sum()
        assert made.count() - kept == 2 * (whole - own)


@pytest.mark.ranks(2)
def test_flash_attention_needs_no_mask_of_a_run(group):
    """On CUDA a value that stands for "causal" replaces the mask of a run."""
    mask, query = AttentionMask(context=ContextShard(29, group)), torch.zeros(1, 1, 7, 6)
    options: dict[str, Any] = {"causal": True, "window": None, "starts": (9, 0)}
    dense, _ = mask.bias(query, 16, **options, for_kernels=True)
    with planning_for("cuda"):
        bias, is_causal = mask.bias(query, 16, **options, for_kernels=True)
        written, _ = mask.bias(query, 16, **options)
    assert isinstance(bias, CausalBias)
    assert not is_causal
    assert torch.equal(bias._materialize(query.device), dense == 0)
    assert written is dense


def test_a_rank_holds_two_runs_as_far_from_the_ends(monkeypatch):
    class Group:
        def size(self):
            return 3

        def rank(self):
            return 1

    shard = ContextShard(14, Group())  # type: ignore[arg-type]
    assert shard.intervals_of_ranks == (((0, 3), (12, 14)), ((3, 6), (10, 12)), ((6, 8), (8, 10)))
    assert shard.sizes == (5, 5, 4)
    assert shard.positions(torch.device("cpu")).tolist() == [3, 4, 5, 10, 11]
    assert shard.runs(1, 4) == [(4, 6), (10, 11)]
    gathered = torch.tensor([0, 1, 2, 12, 13, 3, 4, 5, 10, 11, 6, 7, 8, 9])
    assert shard.in_order(gathered, dim=0).tolist() == list(range(14))
    assert ContextShard(4, Group()).intervals_of_ranks == (((0, 1),), ((1, 2),), ((2, 3), (3, 4)))  # type: ignore[arg-type]
    with pytest.raises(ShardingError, match=r"has 13 positions along dimension 1, and the sequence .* has 14"):
        shard.own(torch.zeros(2, 13), dim=1)


@pytest.mark.ranks(1)
def test_the_example_of_the_page(group):
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["losses"].shape == (2, 128)


@pytest.mark.ranks(4)
def test_groups_that_do_not_fit_are_refused(group):
    message = r"Groups\.cp has the ranks \[\d, \d\], and Groups\.dp .*; dp must have the ranks of all samples and posit"
    with pytest.raises(ConfigError, match=message):
        Groups.of(Topology.create(cp=2, order="tp-dp-cp-ep-pp"))
    topology = Topology.create(cp=2)
    named = {name: topology.group(name) for name in ("tp", "cp", "dp")}
    for wrong in (named, {**named, "dp": None}):
        with pytest.raises(ConfigError, match=message):
            Groups(**wrong)


@pytest.mark.ranks(2)
def test_what_does_not_work_is_refused_by_name(group):
    groups = Groups.of(Topology.create(cp=2))
    with pytest.raises(ConfigError, match="generation has no context parallelism; build the model"):
        generate(build("one key-value head", groups), [1, 2, 3], max_new_tokens=1, sampling=Sampling(temperature=0.0))
    model = build("window", groups)
    with pytest.raises(ShardingError, match="a sequence of 1 positions cannot be split over 2 context-parallel ranks"):
        model(torch.zeros(1, 1, dtype=torch.int64))
    sizes: dict[str, Any] = {"num_layers": 1, "hidden_size": 12, "num_attention_heads": 2}
    with pytest.raises(ConfigError, match=r"context parallelism \(Groups.cp\) is for GPT without a classification"):
        Bert(ModelConfig(**sizes), 50, 16, groups=groups)
    head = Classification("sequence-classification", 3, "single_label_classification", pad_token_id=0)
    with pytest.raises(ConfigError, match=r"context parallelism \(Groups.cp\) is for GPT without a classification"):
        GPT(ModelConfig(**sizes), 50, 16, groups=groups, classification=head)
    seed_streams(1, 0, rng="global")
    dropping = GPT(ModelConfig(**sizes, hidden_dropout=0.0, attention_dropout=0.1), 50, 16, groups=groups)
    with pytest.raises(ConfigError, match=r"attention_dropout 0.1 with training.rng global draws the mask of whole"):
        dropping(torch.zeros(1, 8, dtype=torch.int64))
    seed_streams(1, 0, rng="per_rank")
    assert dropping(torch.zeros(1, 8, dtype=torch.int64)).isfinite().all()
