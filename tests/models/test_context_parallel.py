"""A GPT whose ranks share the positions of each sample equals a GPT on one rank, under every mask."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.groups import from_first_rank
from harness.live_bytes import LiveBytes, Peak
from harness.model_options import LLAMA
from models.model_checks import alone, check_gradients, flexible_on_a_cpu, varlen_on_a_cpu
from torch import Tensor
from torch.nn.attention.bias import CausalBias

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.errors import ConfigError, ShardingError
from shardwise.core.random import seed_streams
from shardwise.core.sequence_view import ContextShard
from shardwise.core.topology import Groups, Topology
from shardwise.kernels.fake_device import planning_for
from shardwise.models import GPT, Experts, ModelConfig, Recomputation
from shardwise.models.experts.moe import MoELayer
from shardwise.models.generation import Sampling, generate
from shardwise.models.transformer import attention_kernels, context_attention, masks as masks_of_attention
from shardwise.models.transformer.context_attention import describe_context_method
from shardwise.models.transformer.heads import GlobalHeads, LatentAttention, LocalHeads
from shardwise.models.transformer.masks import AttentionMask
from shardwise.models.transformer.rotary import RotaryScaling
from shardwise.models.transformer.visibility import Rule
from shardwise.training.gradients.finalize import finalize_gradients_
from shardwise.training.optimizer.grad_norm import global_grad_norm

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
    "queries by position": ({}, {"rope_scaling": RotaryScaling("yarn", 4.0, 8, llama_4_scaling_beta=0.7)}),
    "two kinds of heads": (
        {"window_size": (5, 0), "windowed_layers": (True, False), "global_heads": GlobalHeads(2, 10, True)},
        {"window_rotary_base": 100.0},
    ),
    "written out": ({"attention_backend": "local"}, {}),
    "recomputed": ({"recompute": Recomputation("selective", modules=("core_attn", "layernorm"))}, {}),
    "dropout": ({"attention_dropout": 0.2, "hidden_dropout": 0.2}, LEARNED),
    "experts": ({"experts": Experts(num=8, per_token=2, ffn_hidden_size=22, aux_loss=0.1, z_loss=0.01)}, {}),
}
METHODS = ("all_gather", "a2a", "p2p")
# Soft caps and weights that are written out are for whole rows of scores.
NOT_P2P = ("soft cap", "written out")
LAYOUTS: dict[int, tuple[dict[str, Any], ...]] = {
    2: ({"cp": 2},),
    3: ({"cp": 3},),
    4: ({"cp": 4}, {"cp": 2, "tp": 2, "sp": True}, {"cp": 2, "ep": 4, "etp": 1}),
}


def build(kind: str, groups: Groups, **fields: Any) -> GPT:
    own, options = KINDS[kind]
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 20, "num_attention_heads": 4, "kv_channels": 6}
    config = ModelConfig(
        **sizes | {"hidden_dropout": 0.0, "attention_dropout": 0.0, "init_method_std": 0.2} | own | fields,
        **LLAMA,
        params_dtype=torch.float64,
    )
    given = {"position_embedding_type": "rope", "max_sequence_length": 64} | options
    return GPT(config, VOCABULARY, groups=groups, **given)


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
    if kind not in ("learned", "dropout"):
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


def check(kind: str, topology: Topology, length: int, **fields: Any) -> None:
    groups = Groups.of(topology)
    one = alone(topology)
    rank, number = groups.data.samples
    dense, split = build(kind, one), build(kind, groups, **fields)
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


@pytest.mark.sample(20)
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *((kind, way) for kind in KINDS if kind != "dropout" for way in METHODS if way != "p2p" or kind not in NOT_P2P),
        # Only whole heads have dropout masks that do not depend on the layout, which "auto" knows.
        ("dropout", "auto"),
        ("experts", "auto"),
    ],
)
def test_losses_and_gradients_are_those_of_one_rank(group, kind, way):
    for sizes in LAYOUTS[group.size()]:
        options = dict(sizes)
        sequence_parallel = bool(options.pop("sp", False))
        if "ep" in options and kind != "experts":
            continue
        topology = Topology.create(**options)
        for length in LENGTHS:
            check(kind, topology, length, sequence_parallel=sequence_parallel, cp_comm_type=way)


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["one key-value head", "window", "alibi", "soft cap", "sinks", "latent"])
def test_blocks_of_a_run_add_up(group, monkeypatch, kind):
    monkeypatch.setattr(masks_of_attention, "_ROWS", 5)
    for way in METHODS:
        if way != "p2p" or kind not in NOT_P2P:
            check(kind, Topology.create(cp=2), LENGTHS[0], cp_comm_type=way)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", ["one key-value head", "window", "latent"])
def test_documents_and_windows_need_no_mask_on_cuda(group, monkeypatch, kind):
    """With a definition of the kernel, which PyTorch has on CUDA only."""
    monkeypatch.setattr(attention_kernels, "takes_packed", lambda query: True)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_on_a_cpu)
    check(kind, Topology.create(cp=group.size()), LENGTHS[0])


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["one key-value head", "window", "alibi", "soft cap", "sinks", "latent"])
def test_functions_of_positions_are_those_of_all_ranks(group, monkeypatch, kind):
    found = flexible_on_a_cpu(monkeypatch)
    for way in ("all_gather", "a2a"):
        check(kind, Topology.create(cp=2), LENGTHS[0], cp_comm_type=way)
    assert found


@pytest.mark.ranks(2)
def test_keys_and_values_are_gathered_again_and_not_kept(group):
    own, whole = (length * BATCH * 2 * 6 * 8 for length in (ContextShard(29, group).size, 29))
    groups, batch = Groups.of(Topology.create(cp=2)), batch_of(0, 29)
    model = build("one key-value head", groups, cp_comm_type="all_gather")
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
        patch.setattr(context_attention, "made_again", lambda whole, again: nullcontext())
        loss = model(**batch).sum()
        assert made.count() - kept == 2 * (whole - own)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("groups_of_model", [4, 1])
def test_heads_are_exchanged_and_nothing_else_is_sent(group, groups_of_model):
    groups, batch = Groups.of(Topology.create(cp=3)), batch_of(0, 29)
    model = build("learned", groups, num_query_groups=groups_of_model, hidden_dropout=0.0, cp_comm_type="a2a")
    # 4 query heads on 3 ranks, with their key-value heads or with copies of the only one.
    own = ((2, 2), (1, 1), (1, 1)) if groups_of_model == 4 else ((2, 1), (1, 1), (1, 1))
    there = sum(queries + 2 * keys for queries, keys in own)
    back = own[group.rank()][0]
    with CollectiveCounter() as counter:
        model(**batch).sum().backward()
    size = ContextShard(29, group).size
    own_width = own[group.rank()][0] + 2 * own[group.rank()][1]
    number = BATCH * 6 * 8
    assert [(each.name, each.num_bytes) for each in counter.launches] == [
        *[("all_to_all", size * there * number), ("all_to_all", 29 * back * number)] * 2,
        *[("all_to_all", size * 4 * number), ("all_to_all", 29 * own_width * number)] * 2,
    ]


@pytest.mark.ranks(2)
def test_auto_chooses_by_heads(group):
    groups, batch = Groups.of(Topology.create(cp=2)), batch_of(0, 29)
    documents = torch.arange(29).expand(BATCH, -1) // 10
    for fields, given, ways in (
        ({}, {}, ["all_to_all"] * 8),
        ({}, {"document_ids": documents}, ["all_to_all"] * 8),
        ({"num_query_groups": 1}, {}, ["all_gather"] * 2 + ["all_gather", "reduce_scatter"] * 2),
    ):
        model = build("learned", groups, hidden_dropout=0.0, **fields)
        with CollectiveCounter() as counter:
            model(**batch, **given).sum().backward()
        assert [each.name for each in counter.launches] == ways


@pytest.mark.parametrize(
    ("asked", "queries_of_groups", "ranks", "draws", "said"),
    [
        ("a2a", (1, 1), 2, False, "a2a"),
        ("auto", (1, 1, 1, 1), 2, False, "a2a: 2 ranks divide 4 key-value heads"),
        ("auto", (1, 1, 1, 1), 2, True, "a2a: dropout of attention weights with rng global"),
        ("auto", (2, 2), 4, False, "all_gather: 2 key-value heads on 4 ranks"),
        ("auto", (4, 4), 2, False, "all_gather: 8 query heads, which are more to send than 2 key-value heads"),
    ],
)
def test_the_way_is_described(asked, queries_of_groups, ranks, draws, said):
    assert describe_context_method(asked, LocalHeads(queries_of_groups), ranks, draws=draws) == said


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_logit_softcap": 2.0}, "attention_logit_softcap is 2.0, which cp_comm_type 'p2p' does not offer"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1, which cp_comm_type 'p2p' does not offer; use 'all_ga"),
        ({"attention_backend": "local"}, "attention_backend is 'local', and cp_comm_type 'p2p' chooses kernels by"),
        ({"cp_comm_type": "ring"}, "cp_comm_type is 'ring'; it must be one of auto, all_gather, a2a, p2p"),
    ],
    ids=["soft cap", "dropout", "backend", "name"],
)
def test_what_a_ring_does_not_offer_is_refused(fields, message):
    given: dict[str, Any] = {"attention_dropout": 0.0, "cp_comm_type": "p2p"} | fields
    with pytest.raises(ConfigError, match=re.escape(message)):
        ModelConfig(num_layers=1, hidden_size=12, num_attention_heads=2, **given)


def test_heads_of_context_parallel_ranks():
    uneven = LocalHeads((1, 2, 1)).over(2)
    assert [(part.queries_of_groups, part.groups, part.queries) for part in uneven] == [
        ((1, 2), (0, 2), (0, 3)),
        ((1,), (2, 3), (3, 4)),
    ]
    assert [part.queries for part in LocalHeads((1,) * 6).over(4)] == [(0, 2), (2, 4), (4, 5), (5, 6)]
    copies = LocalHeads((3, 3)).over(4)
    assert [(part.queries_of_groups, part.groups) for part in copies] == [
        ((2,), (0, 1)),
        ((1, 1), (0, 2)),
        ((1,), (1, 2)),
        ((1,), (1, 2)),
    ]


def test_a_mask_of_some_heads():
    all_heads, some = LocalHeads((1, 1, 1)), LocalHeads((1, 1), 1, 1)
    forbidden, slopes = torch.rand(2, 3, 5, 5) < 0.5, torch.rand(3)
    mask = AttentionMask(forbidden, alibi_slopes=slopes)
    own = mask.of_heads(some, all_heads)
    assert own is mask.of_heads(some, all_heads)
    assert own.forbidden is not None
    assert own.alibi_slopes is not None
    assert torch.equal(own.forbidden, forbidden[:, 1:])
    assert torch.equal(own.alibi_slopes, slopes[1:])
    one = AttentionMask(forbidden[:, :1]).of_heads(some, all_heads)
    assert one.forbidden is not None
    assert torch.equal(one.forbidden, forbidden[:, :1])
    with pytest.raises(ShardingError, match=r"\[2, 2, 5, 5\]; it must .*, and this rank has 3 query heads"):
        AttentionMask(forbidden[:, 1:]).of_heads(some, all_heads)


@pytest.mark.ranks(4)
def test_four_ranks_hold_a_sample_four_times_as_long(group):
    """Their peaks are those of one rank on a quarter of the length, and one rank would need four times that."""
    groups, length = Groups.of(Topology.create(cp=4)), 256

    def peak_of(model: GPT, length: int) -> int:
        batch = batch_of(0, length)
        # Tables of angles are kept from forward to forward, gradients from backward to backward.
        for _ in range(2):
            with Peak() as peak:
                model(**batch).sum().backward()
        return peak.peak

    options: dict[str, Any] = {"num_layers": 8, "hidden_size": 64, "kv_channels": 16}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KINDS, "long", (options, {"max_sequence_length": 4 * length}))
        peaks = None
        if group.rank() == 0:
            one = build("long", Groups.alone(groups.tp))
            peaks = peak_of(one, length), peak_of(one, 4 * length)
        split = peak_of(build("long", groups), 4 * length)
    few, many = from_first_rank(peaks)
    assert many > 3.8 * few
    assert 0.9 * few < split < 1.1 * few


@pytest.mark.ranks(2)
def test_flash_attention_needs_no_mask_of_a_run(group):
    """On CUDA a value that stands for "causal" replaces the mask of a run."""
    mask, query = AttentionMask(context=ContextShard(29, group)), torch.zeros(1, 1, ContextShard(29, group).size, 6)
    options: dict[str, Any] = {"rule": Rule(True), "rows": 29}
    dense = mask.blocks(query, 29, **options, for_kernels=True)
    with planning_for("cuda"):
        short = mask.blocks(query, 29, **options, for_kernels=True)
        written = mask.blocks(query, 29, **options)
    for one, other, third in zip(dense, short, written, strict=True):
        ((part,), (by_value,), (biased,)) = one.parts, other.parts, third.parts
        assert part.keys == by_value.keys == biased.keys
        if by_value.is_causal:
            continue
        bias, expected = by_value.made_bias(), part.made_bias()
        assert isinstance(bias, CausalBias)
        assert expected is not None
        assert torch.equal(bias._materialize(query.device), expected[0, 0] == 0)
        assert biased.made_bias() is expected


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


@pytest.mark.ranks(2)
def test_the_example_of_the_page(group):
    text = PAGE.read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(block.replace("cp=1", "cp=2"), names)
    assert names["losses"].shape == (2, 64)
    positions, labels = re.findall(r"`(model\.view_of\(128\)[^`]*)`", text)
    assert eval(positions, names).shape == (64,)
    assert eval(labels, names | {"labels": torch.zeros(2)}).shape == (1,)


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
    few: dict[str, Any] = {"num_layers": 1, "hidden_size": 12, "num_attention_heads": 1, "cp_comm_type": "a2a"}
    with pytest.raises(ConfigError, match=r"tensor-parallel rank, which are 1, over 2 .*: there are more ranks than"):
        GPT(ModelConfig(**few), 50, 16, groups=groups)
    seed_streams(1, 0, rng="global")
    gathering: dict[str, Any] = {"cp_comm_type": "all_gather", "hidden_dropout": 0.0, "attention_dropout": 0.1}
    dropping = GPT(ModelConfig(**sizes, **gathering), 50, 16, groups=groups)
    with pytest.raises(ConfigError, match=r"attention_dropout 0.1 with training.rng global draws the mask of whole"):
        dropping(torch.zeros(1, 8, dtype=torch.int64))
    seed_streams(1, 0, rng="per_rank")
    assert dropping(torch.zeros(1, 8, dtype=torch.int64)).isfinite().all()
