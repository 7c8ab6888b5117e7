"""GPT at any tensor-parallel size equals a dense GPT that shares no code with it."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness.parity import assert_bit_equal, assert_close_to, assert_unmodified, gather_shards
from models.dense_gpt import DenseGPT
from models.model_checks import randomise_small_parameters, whole_logits, whole_weights
from torch.distributed import ProcessGroup

from shardwise.core.errors import ConfigError, ShardingError, VocabularyError
from shardwise.megatron.config import TransformerConfig
from shardwise.megatron.models.gpt import GPTModel
from shardwise.megatron.process_groups_config import ProcessGroupCollection
from shardwise.models.transformer.layer import TransformerLayerSpec
from shardwise.tensor_parallel.layers import drain_embedding_wgrad_compute, named_param_layouts


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
        self,
        group: ProcessGroup,
        *,
        sequence_parallel: bool = False,
        dtype: torch.dtype = torch.float64,
        **options: Any,
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
            **{"hidden_dropout": 0.0, "attention_dropout": 0.0} | options,
        )
        alone = sequence_parallel and group.size() == 1
        expectation = pytest.warns(UserWarning, match="is off in this model") if alone else contextlib.nullcontext()
        with expectation as told:
            model = self._model(config, group)
        # Once, not for each layer.
        assert not alone or len(told) == 1
        assert model.sequence_parallel == (sequence_parallel and not alone)
        return model

    def _model(self, config: TransformerConfig, group: ProcessGroup) -> GPTModel:
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


@pytest.mark.ranks(1, 2, 3, 4, slow=(1, 2, 4))
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("loss", [pytest.param("plain", marks=pytest.mark.slow), "linear_fused"])
def test_gpt_equals_dense_gpt(group, shape, sequence_parallel, loss):
    torch.manual_seed(3)
    fused = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}
    model = shape.model(group, sequence_parallel=sequence_parallel, **fused if loss == "linear_fused" else {})
    assert model.fuses_output_layer_and_loss == (loss == "linear_fused")
    randomise_small_parameters(model, group)
    weights = whole_weights(model, group)
    # Divides nothing, with sequence parallelism too.
    s = 13
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

    assert_close_to(
        whole_logits(logits, group), shape.dense().logits(weights, ids).detach(), rtol_of_norm=1e-13, name="logits"
    )
    assert_close_to(loss.detach(), expected_loss.detach(), rtol_of_norm=1e-13, name="loss")
    for name, param, layout in named_param_layouts(model, group.size()):
        gradient = param.grad
        if sequence_parallel and getattr(param, "sequence_parallel", False) and group.size() > 1:
            torch.distributed.all_reduce(gradient, group=group)
        gradient = gather_shards(gradient, layout, group)
        assert_close_to(gradient, weights[name].grad, rtol_of_norm=1e-10, name=f"gradient of {name}")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
def test_what_parts_return_may_be_written_to(group, sequence_parallel):
    def double(module, inputs, output):
        return output * 2

    def double_(module, inputs, output):
        output *= 2

    shape, ids, gradients = Shape(), torch.randint(101, (1, 13)), []
    for hook in (double, double_):
        torch.manual_seed(3)
        model = shape.model(group, sequence_parallel=sequence_parallel)
        for part in (model.embedding, *model.decoder.layers, model):
            part.register_forward_hook(hook)
        model(ids, labels=ids).sum().backward()
        gradients.append([param.grad for param in model.parameters()])
    for written, expected in zip(*gradients, strict=True):
        assert_bit_equal(written, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
def test_a_deferred_output_gradient_is_the_same(group, shape, sequence_parallel):
    sequence_parallel = sequence_parallel and group.size() > 1
    torch.manual_seed(3)
    plain = shape.model(group, sequence_parallel=sequence_parallel)
    model = shape.model(
        group,
        sequence_parallel=sequence_parallel,
        gradient_accumulation_fusion=True,
        defer_embedding_wgrad_compute=True,
    )
    model.load_state_dict(plain.state_dict())
    for param in model.parameters():
        param.main_grad = torch.zeros_like(param, requires_grad=False)
    for _ in range(3):
        ids = torch.randint(shape.vocab, (2, 13))
        for each in (plain, model):
            each(ids, labels=ids).mean().backward()
    assert len(model.embedding_activation_buffer) == 3
    weight = model.embedding.word_embeddings.weight if shape.tied else model.output_layer.weight
    drain_embedding_wgrad_compute(
        model.config, model.embedding_activation_buffer, model.grad_output_buffer, weight, group
    )
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        total = param.main_grad if param.grad is None else param.main_grad + param.grad
        assert_close_to(total, other.grad, rtol_of_norm=1e-10, name=name)


@pytest.mark.ranks(2)
def test_impossible_models_and_inputs_are_refused_on_every_rank(group):
    shape = SHAPES["gpt-tied"]
    with pytest.raises(ConfigError, match="vocab_size 1 must be at least the 2"):
        Shape(vocab=1).model(group)
    model = shape.model(group, sequence_parallel=True)
    with pytest.raises(ShardingError, match="17 tokens"):
        model(torch.zeros(1, 17, dtype=torch.int64))
    with pytest.raises(VocabularyError, match="token id 101 at position"):
        model(torch.full((1, 12), 101))
    with pytest.raises(ShardingError, match="input_ids is None; pass the tokens"):
        model(None)


@pytest.mark.ranks(2)
def test_what_is_no_batch_of_tokens_is_one_error(group):
    model = Shape().model(group)
    ids = torch.zeros(2, 4, dtype=torch.long)
    for arguments, message in (
        ({"input_ids": ids[:0]}, r"input_ids has shape \[0, 4\]; it must be \[b, s\], with at least one"),
        ({"input_ids": ids[:, :0], "labels": ids[:, :0]}, r"input_ids has shape \[2, 0\]"),
        ({"input_ids": ids[0]}, r"input_ids has shape \[4\]; it must be \[b, s\]"),
        ({"input_ids": [[1, 2]]}, r"input_ids is of type list; pass a torch\.Tensor"),
        ({"input_ids": ids.numpy()}, "input_ids is of type ndarray"),
        ({"input_ids": ids, "labels": [[1]]}, "labels is of type list"),
        ({"input_ids": ids, "labels": ids[:, :2]}, r"labels has shape \[2, 2\], and input_ids \[2, 4\]"),
        ({"input_ids": ids, "position_ids": [0, 1, 2, 3]}, "position_ids is of type list"),
        ({"input_ids": ids, "attention_mask": [[1]]}, "attention_mask is of type list"),
    ):
        with pytest.raises(ShardingError, match=message):
            model(**{"position_ids": None, "attention_mask": None} | arguments)
    with pytest.raises(VocabularyError, match=r"is of torch\.float32; ids are of an integer dtype"):
        model(ids.float(), None, None)


@pytest.mark.ranks(1)
def test_a_model_is_not_pickled_but_its_state_is(group):
    model = Shape().model(group)
    for save in (pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
        with pytest.raises(ShardingError, match=r"cannot be pickled: .*torch\.save\(model\.state_dict\(\), PATH\)"):
            save(model)
    torch.save(model.state_dict(), io.BytesIO())
    assert copy.copy(model).embedding is model.embedding
