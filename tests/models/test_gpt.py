"""GPT at any tensor-parallel size equals a dense GPT that shares no code with it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from harness.parity import assert_bit_equal, assert_close_to, assert_unmodified, gather_shards
from models.dense_gpt import DenseGPT
from torch.distributed import ProcessGroup

from shardwise.config import TransformerConfig
from shardwise.errors import ConfigError, ShardingError, VocabularyError
from shardwise.models.gpt import GPTModel
from shardwise.process_groups_config import ProcessGroupCollection
from shardwise.tensor_parallel.layers import named_param_layouts
from shardwise.transformer.layer import TransformerLayerSpec


@dataclass(frozen=True)
class Shape:
    """One model: sizes that divide nothing next to round ones."""

    vocab: int = 101
    heads: int = 7
    groups: int = 7
    head_dim: int = 6
    hidden: int = 42
    ffn: int = 29
    layers: int = 2
    llama: bool = False
    tied: bool = True

    def model(
        self, group: ProcessGroup, *, sequence_parallel: bool = False, dtype: torch.dtype = torch.float64
    ) -> GPTModel:
        config = TransformerConfig(
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            num_query_groups=self.groups,
            kv_channels=self.head_dim,
            ffn_hidden_size=self.ffn,
            normalization="RMSNorm" if self.llama else "LayerNorm",
            gated_linear_unit=self.llama,
            activation_func=F.silu if self.llama else F.gelu,
            add_bias_linear=not self.llama,
            tensor_model_parallel_size=group.size(),
            sequence_parallel=sequence_parallel,
            params_dtype=dtype,
            init_method_std=0.3,
        )
        return GPTModel(
            config,
            TransformerLayerSpec(),
            self.vocab,
            max_sequence_length=16,
            share_embeddings_and_output_weights=self.tied,
            position_embedding_type="rope" if self.llama else "learned_absolute",
            pg_collection=ProcessGroupCollection(tp=group),
        )

    def dense(self) -> DenseGPT:
        return DenseGPT(
            self.layers, self.heads, self.groups, self.head_dim, self.llama, self.llama, self.llama, self.tied
        )


SHAPES = {
    "gpt-tied": Shape(),
    "llama-grouped": Shape(vocab=64, heads=8, groups=4, head_dim=8, hidden=24, ffn=40, llama=True, tied=False),
}


def randomise_small_parameters(model: GPTModel) -> None:
    """Biases start at 0 and norms at 1, which would hide mistakes in them. The same numbers on every rank."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, param, layout in named_param_layouts(model, model.tp_group.size()):
            if len(layout.global_shape) == 1:
                noise = torch.randn(layout.global_shape, generator=generator, dtype=param.dtype) * 0.2
                param += layout.take(noise, model.tp_group.rank())


def whole_weights(model: GPTModel, group: ProcessGroup) -> dict[str, torch.Tensor]:
    return {
        name: gather_shards(param, layout, group).requires_grad_()
        for name, param, layout in named_param_layouts(model, group.size())
    }


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
def test_gpt_equals_dense_gpt(group, shape, sequence_parallel):
    torch.manual_seed(3)
    model = shape.model(group, sequence_parallel=sequence_parallel)
    randomise_small_parameters(model)
    weights = whole_weights(model, group)
    # Sequence parallelism needs a multiple of the ranks; 13 divides nothing.
    s = 12 if sequence_parallel else 13
    ids = torch.randint(shape.vocab, (3, s))
    labels = torch.randint(shape.vocab, (3, s))
    labels[0, 2] = -100
    expected_loss = shape.dense().loss(weights, ids, labels)
    weighting = torch.rand(3, s, dtype=torch.float64)
    (expected_loss * weighting).sum().backward()

    with assert_unmodified(ids=ids, labels=labels):
        logits = model(ids)
        loss = model(ids, labels=labels)
        (loss * weighting).sum().backward()

    local = logits.detach().permute(1, 0, 2).contiguous()
    whole = [torch.empty(0)] * group.size()
    torch.distributed.all_gather_object(whole, local, group=group)
    assert_close_to(
        torch.cat(whole, -1), shape.dense().logits(weights, ids).detach(), rtol_of_norm=1e-13, name="logits"
    )
    assert_close_to(loss.detach(), expected_loss.detach(), rtol_of_norm=1e-13, name="loss")
    for name, param, layout in named_param_layouts(model, group.size()):
        gradient = param.grad
        if sequence_parallel and getattr(param, "sequence_parallel", False) and group.size() > 1:
            torch.distributed.all_reduce(gradient, group=group)
        gradient = gather_shards(gradient, layout, group)
        assert_close_to(gradient, weights[name].grad, rtol_of_norm=1e-10, name=f"gradient of {name}")


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_changing_a_token_changes_no_logit_before_it(group, shape):
    model = shape.model(group)
    ids = torch.randint(shape.vocab, (2, 13))
    before = model(ids)
    for position in (0, 6, 12):
        changed = ids.clone()
        changed[:, position] = (changed[:, position] + 1) % shape.vocab
        after = model(changed)
        assert_bit_equal(after[:position], before[:position], name=f"logits before token {position}")
        # Logits are split over the vocabulary: each rank sees the change in its own part.
        assert not torch.equal(after[position:], before[position:])


@pytest.mark.ranks(2)
def test_impossible_models_and_inputs_are_refused_on_every_rank(group):
    shape = SHAPES["gpt-tied"]
    with pytest.raises(ConfigError, match="1 key-value heads cannot be split over 2"):
        Shape(heads=7, groups=1).model(group)
    with pytest.raises(ConfigError, match="vocab_size 1 must be at least the 2"):
        Shape(vocab=1).model(group)
    model = shape.model(group, sequence_parallel=True)
    with pytest.raises(ShardingError, match="splits 13 tokens over 2 ranks"):
        model(torch.zeros(1, 13, dtype=torch.int64))
    with pytest.raises(ShardingError, match="17 tokens"):
        model(torch.zeros(1, 17, dtype=torch.int64))
    with pytest.raises(VocabularyError, match="token id 101 at position"):
        model(torch.full((1, 12), 101))
