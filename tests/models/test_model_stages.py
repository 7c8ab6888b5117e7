"""A model's pipeline stages are the whole model: where they start, what they compute, what they are called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness.model_options import NO_DROPOUT
from harness.parity import assert_bit_equal, assert_close_to, assert_unmodified
from models.model_checks import randomise_small_parameters
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.errors import ConfigError, ShardingError, TopologyError
from shardwise.core.topology import Groups, Topology
from shardwise.megatron.config import TransformerConfig
from shardwise.megatron.models.bert import BertModel
from shardwise.megatron.models.gpt import GPTModel
from shardwise.megatron.process_groups_config import ProcessGroupCollection
from shardwise.megatron.schedules import hidden_shape
from shardwise.models.gpt import GPT
from shardwise.models.transformer.layer import TransformerLayerSpec
from shardwise.models.transformer_model import TransformerModel
from shardwise.training.gradients.finalize import finalize_gradients_
from shardwise.training.pipeline import Pipeline, make_schedule

V, B, S, LAYERS = 103, 2, 11, 5
KINDS = ("gpt-tied", "gpt-rope", "bert-tied")


def config_of(tp: int, **settings: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=LAYERS,
        num_attention_heads=4,
        hidden_size=24,
        ffn_hidden_size=29,
        params_dtype=torch.float64,
        **NO_DROPOUT,
        init_method_std=0.3,
        tensor_model_parallel_size=tp,
        **settings,
    )


def make(kind: str, config: TransformerConfig, groups: ProcessGroupCollection, **options: Any) -> TransformerModel:
    """The whole model, or the part that ``options`` say, from the same seed."""
    torch.manual_seed(3)
    options |= {"share_embeddings_and_output_weights": kind.endswith("tied"), "pg_collection": groups}
    if kind.startswith("bert"):
        return BertModel(config, 2, TransformerLayerSpec(), V, 16, **options)
    position = "rope" if kind == "gpt-rope" else "learned_absolute"
    return GPTModel(config, TransformerLayerSpec(), V, 16, position_embedding_type=position, **options)


def two_stages(group: ProcessGroup, kind: str, **settings: Any) -> tuple[TransformerModel, TransformerModel, Topology]:
    """This rank's stage, the whole model on the stage's tensor-parallel group, and the topology."""
    topology = Topology.create(tp=group.size() // 2, pp=2)
    tp, stage = topology.size("tp"), topology.rank("pp")
    groups = ProcessGroupCollection.from_topology(topology)
    config = config_of(tp, pipeline_model_parallel_size=2, **settings)
    part = make(kind, config, groups, pre_process=stage == 0, post_process=stage == 1)
    whole = make(kind, config_of(tp, **settings), ProcessGroupCollection(tp=groups.tp))
    return part, whole, topology


def same_names(part: TransformerModel, whole: TransformerModel) -> dict[str, tuple[Tensor, Tensor]]:
    """By the name in the whole model, each of the part's parameters and the whole's."""
    of_whole = whole.sharded_state_dict()
    return {name: (entry.data, of_whole[name].data) for name, entry in part.sharded_state_dict().items()}


def run(part: TransformerModel, topology: Topology, *args: Any, **labels: Tensor) -> Tensor | None:
    """One forward and backward over two stages, by plain messages; the loss on the last."""
    other = topology.ranks("pp")[1 - topology.rank("pp")]
    if topology.rank("pp") == 0:
        hidden = part(*args, **labels)
        dist.send(hidden.detach().contiguous(), other)
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, other)
        hidden.backward(gradient)
        return None
    rows = S // topology.size("tp") + (topology.rank("tp") < S % topology.size("tp"))
    input_ = torch.empty(rows if part.sequence_parallel else S, B, 24, dtype=torch.float64)
    dist.recv(input_, other)
    part.set_input_tensor([input_.requires_grad_()])
    loss = loss_of(part(*args, **labels))
    loss.backward()
    dist.send(input_.grad, other)
    return loss.detach()


def loss_of(output: Any) -> Tensor:
    if isinstance(output, tuple):
        return output[0].mean() + output[1].square().mean()
    return output.mean()


def batch(kind: str) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    ids = torch.randint(V, (B, S))
    if kind.startswith("bert"):
        return (ids, (torch.arange(S) < 9).expand(B, -1)), {"lm_labels": ids}
    return (ids,), {"labels": ids}


@pytest.mark.ranks(2, 4, slow=(4,))
@pytest.mark.parametrize("kind", KINDS)
def test_two_stages_are_the_whole_model(group, kind):
    """Initial values, names, loss, gradients; after optimizer steps the copies of a tied weight are the same bits."""
    part, whole, topology = two_stages(group, kind, sequence_parallel=group.size() > 2)
    stage, tied = topology.rank("pp"), kind.endswith("tied")
    for name, (own, other) in same_names(part, whole).items():
        assert_bit_equal(own.detach(), other.detach(), name=f"start of {name}")
    names: list[Any] = [None, None]
    dist.all_gather_object(names, list(part.sharded_state_dict()), group=topology.group("pp"))
    assert set(names[0]) | set(names[1]) == set(whole.sharded_state_dict())
    assert set(names[0]) & set(names[1]) == ({"embedding.word_embeddings.weight"} if tied else set())
    assert [layer.layer_number for layer in part.block.layers] == [[1, 2, 3], [4, 5]][stage]
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    for step in range(3):
        args, labels = batch(kind)
        loss = run(part, topology, *args, **labels)
        finalize_gradients_(
            part, tp_group=topology.group("tp"), dp_group=topology.group("dp"), embd_group=topology.group("embd")
        )
        if step == 0:
            expected = loss_of(whole(*args, **labels))
            expected.backward()
            finalize_gradients_(whole, tp_group=topology.group("tp"), dp_group=topology.group("dp"))
            if loss is not None:
                assert_close_to(loss, expected.detach(), rtol_of_norm=1e-12, name="loss")
            norm = float(torch.stack([param.grad.norm() for param in whole.parameters()]).norm())
            for name, (own, other) in same_names(part, whole).items():
                # Of the global norm, as a key bias's gradient is zero in truth.
                assert (own.grad - other.grad).norm() <= 1e-12 * norm, f"gradient of {name}"
        optimizer.step()
        optimizer.zero_grad()
    if tied:
        copies: list[Any] = [None, None]
        weight = part.shared_embedding_or_output_weight()
        dist.all_gather_object(copies, weight.detach(), group=topology.group("embd"))
        assert_bit_equal(copies[0], copies[1], name="copies of the tied weight after three steps")
        assert not torch.equal(copies[0], whole.shared_embedding_or_output_weight())


def bert_batches(m: int) -> list[dict[str, Tensor]]:
    """``m`` micro-batches, each with texts, paddings, token types and masked tokens of its own."""
    batches = []
    for micro_batch in range(m):
        ids = torch.randint(V, (B, S))
        lengths = torch.tensor([S - 2 * micro_batch % 7, 4 + micro_batch])
        masked = torch.rand(B, S) < 0.4
        masked[:, 1] = True
        batches.append(
            {
                "input_ids": ids,
                "attention_mask": (torch.arange(S) < lengths[:, None]).long(),
                "tokentype_ids": (torch.arange(S) >= 2 + micro_batch).long().expand(B, -1),
                "lm_labels": torch.where(masked & (torch.arange(S) < lengths[:, None]), ids, -100),
                "is_next": torch.randint(2, (B,)),
            }
        )
    return batches


def bert_loss(output: tuple[Tensor, Tensor | None], is_next: Tensor) -> Tensor:
    losses, choice = output
    return losses.sum() + (0.0 if choice is None else F.cross_entropy(choice, is_next))


BERTS = {
    "with-binary-head": ({}, {"add_binary_head": True}),
    "without-binary-head": ({}, {"add_binary_head": False}),
    "post-norm": (
        {"norm_position": "post", "embedding_layernorm": True, "final_layernorm": False},
        {"add_binary_head": True},
    ),
}


@pytest.mark.ranks(2, 4, slow=(4,))
@pytest.mark.parametrize("kind", BERTS)
def test_every_micro_batch_of_bert_has_its_own_padding_and_token_types(group, kind):
    """Loss and gradients of several micro-batches at once are those of the whole model, one after the other."""
    settings, options = BERTS[kind]
    m = 5
    batches = bert_batches(m)
    topology = Topology.create(tp=group.size() // 2, pp=2)
    tp, stage = topology.size("tp"), topology.rank("pp")
    groups = ProcessGroupCollection.from_topology(topology)
    whole = make("bert-tied", config_of(tp, **settings), ProcessGroupCollection(tp=groups.tp), **options)
    randomise_small_parameters(whole, groups.tp)
    expected = []
    for given in batches:
        ids, mask, types, labels, is_next = given.values()
        loss = bert_loss(whole(ids, mask, types, labels), is_next) / m
        loss.backward()
        expected.append(loss.detach())
    finalize_gradients_(whole, tp_group=groups.tp, dp_group=topology.group("dp"))
    norm = torch.stack([param.grad.norm() for param in whole.parameters()]).norm()

    for name in ("gpipe", "1f1b", "zero-bubble"):
        config = config_of(
            tp,
            pipeline_model_parallel_size=2,
            sequence_parallel=tp > 1,
            delay_wgrad_compute=name == "zero-bubble",
            **settings,
        )
        part = make("bert-tied", config, groups, pre_process=stage == 0, post_process=stage == 1, **options)
        with torch.no_grad():
            for own, other in same_names(part, whole).values():
                own.copy_(other)

        def forward(micro_batch: int, _: int, part: TransformerModel = part) -> Any:
            ids, mask, types, labels, _ = batches[micro_batch].values()
            return part(ids, mask, types, labels)

        def loss_step(micro_batch: int, output: Any) -> tuple[Tensor, Tensor]:
            loss = bert_loss(output, batches[micro_batch]["is_next"]) / m
            return loss, loss.detach()

        with assert_unmodified(*(tensor for given in batches for tensor in given.values())):
            losses = Pipeline([part], group=topology.group("pp")).run(
                make_schedule(name, 2, m),
                forward,
                loss_step,
                shape=hidden_shape(config, S, B, tp_group=groups.tp),
                dtype=torch.float64,
                device=torch.device("cpu"),
            )
        finalize_gradients_(part, tp_group=groups.tp, dp_group=topology.group("dp"), embd_group=topology.group("embd"))
        assert len(losses) == (m if stage == 1 else 0)
        if losses:
            assert_close_to(torch.stack(losses), torch.stack(expected), rtol_of_norm=1e-12, name=f"losses of {name}")
        for key, (own, other) in same_names(part, whole).items():
            # Each has one that is not zero in truth.
            assert other.grad.norm() > 1e-4 * norm, key
            assert_close_to(own.grad, other.grad, rtol_of_norm=1e-12, name=f"{name}: {key}")


@pytest.mark.ranks(2)
def test_chunks_and_stages_made_on_the_meta_device_start_alike(group):
    topology = Topology.create(tp=1, pp=2)
    groups = ProcessGroupCollection.from_topology(topology)
    stage = topology.rank("pp")
    whole = make("gpt-tied", config_of(1), ProcessGroupCollection(tp=groups.tp))
    after = torch.get_rng_state()
    config = config_of(1, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    # Parts of 2, 1, 1 and 1 layers.
    numbers = {(0, 0): [1, 2], (1, 0): [3], (0, 1): [4], (1, 1): [5]}
    for chunk in (0, 1):
        options = {"pre_process": (stage, chunk) == (0, 0), "post_process": (stage, chunk) == (1, 1), "vp_stage": chunk}
        part = make("gpt-tied", config, groups, **options)
        assert [layer.layer_number for layer in part.block.layers] == numbers[stage, chunk]
        assert torch.equal(torch.get_rng_state(), after)
        for name, (own, other) in same_names(part, whole).items():
            assert_bit_equal(own.detach(), other.detach(), name=name)
        with torch.device("meta"):
            late = make("gpt-tied", config, groups, **options)
        torch.manual_seed(3)
        late.reset_parameters()
        for (name, own), expected in zip(late.named_parameters(), part.parameters(), strict=True):
            assert_bit_equal(own.detach(), expected.detach(), name=name)
            assert vars(own) == vars(expected), name


@pytest.mark.ranks(2)
def test_stages_that_cannot_be_are_refused(group):
    topology = Topology.create(tp=1, pp=2)
    groups = ProcessGroupCollection.from_topology(topology)
    config = config_of(1, pipeline_model_parallel_size=2)
    with pytest.raises(TopologyError, match="pipeline_model_parallel_size is 2, and there is no pipeline-parallel gro"):
        make("gpt-rope", config, ProcessGroupCollection(tp=groups.tp), post_process=False)
    with pytest.raises(TopologyError, match="size is 2, and there is a group of 1 ranks"):
        make("gpt-rope", config, ProcessGroupCollection(tp=groups.tp, pp=groups.tp), post_process=False)
    with pytest.raises(TopologyError, match="tied over several pipeline stages, and there is no embedding group"):
        make("gpt-tied", config, ProcessGroupCollection(tp=groups.tp, pp=groups.pp), post_process=False)
    with pytest.raises(
        ConfigError, match=r"size is 1, and the model is one of 2 stages \(pre_process=True, post_process=F"
    ):
        GPT(config_of(1), 23, S, groups=Groups.of(topology), post_process=False)
    # A program of Megatron's that leaves the number out gets its part of the layers.
    assert make("gpt-rope", config_of(1), groups, post_process=False).config.pipeline_model_parallel_size == 2
    interleaved = config_of(1, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    for vp_stage, message in ((None, "each stage has 2 chunks; give vp_stage"), (2, "vp_stage is 2; it must be")):
        with pytest.raises(ConfigError, match=message):
            make("gpt-rope", interleaved, groups, vp_stage=vp_stage)
    later = make("gpt-rope", config, groups, pre_process=False, post_process=False)
    ids = torch.zeros(B, S, dtype=torch.int64)
    with pytest.raises(ShardingError, match=r"no embedding \(pre_process=False\); call set_input_tensor"):
        later(ids)
    with pytest.raises(ShardingError, match="a stage has one input tensor, and 2 are given"):
        later.set_input_tensor([torch.zeros(1), torch.zeros(1)])
    later.set_input_tensor(torch.zeros(S, B, 24, dtype=torch.float64))
    # What it would read of the tokens is their number.
    assert_bit_equal(later(None), later(ids))
