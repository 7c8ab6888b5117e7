"""Recomputation by the config: the same bits, parts that are called again, fewer bytes kept."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness.parity import assert_bit_equal
from torch.distributed import ProcessGroup

from shardwise.core.errors import ConfigError
from shardwise.core.random import seed_streams, streams
from shardwise.core.topology import Groups
from shardwise.megatron.config import TransformerConfig
from shardwise.models.bert import Bert
from shardwise.models.config import ModelConfig
from shardwise.models.gpt import GPT
from shardwise.models.recomputation import Recomputation
from shardwise.models.transformer.attention import SelfAttention
from shardwise.models.transformer.block import TransformerBlock

VOCAB, LENGTH, LAYERS = 31, 6, 3
LLAMA = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu, "num_query_groups": 2}
FULL = {"recompute_granularity": "full"}
SELECTIVE = {"recompute_granularity": "selective"}


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute": Recomputation("selective", modules=modules)}


class Step:
    """Loss and gradients of one step, how often each kind of part was called, and the bytes kept for the backward."""

    def __init__(self, kind: type[GPT | Bert], group: ProcessGroup, **options: Any) -> None:
        torch.manual_seed(5)
        config = ModelConfig(
            num_layers=LAYERS,
            hidden_size=16,
            num_attention_heads=4,
            ffn_hidden_size=22,
            hidden_dropout=0.2,
            attention_dropout=0.1,
            params_dtype=torch.float64,
            **options,
        )
        model = kind(config, VOCAB, LENGTH, groups=Groups(tp=group))
        self.calls: Counter[str] = Counter()
        (block,) = (module for module in model.modules() if isinstance(module, TransformerBlock))
        for name, module in block.named_modules():
            module.register_forward_pre_hook(lambda *_, part=name: self.calls.update([part]))
            if isinstance(module, SelfAttention):
                self._count_core(module, name)
        seed_streams(7, group.rank())
        ids = torch.randint(VOCAB, (2, LENGTH))
        kept: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            kept[storage._cdata] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = model(ids) if kind is GPT else model(ids, torch.ones_like(ids))
        logits = output[0] if isinstance(output, tuple) else output
        self.num_bytes = sum(storage.nbytes() for storage in kept.values())
        logits.square().mean().backward()
        self.results = {"logits": logits, "random numbers": torch.get_rng_state(), **streams().get_states()}
        self.results |= {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
        streams().reset()

    def _count_core(self, attention: Any, name: str) -> None:
        attend = attention._attend

        def counted(*args: Any) -> Any:
            self.calls.update([f"{name}.core"])
            return attend(*args)

        attention._attend = counted

    def repeats(self, plain: Step) -> set[str]:
        """Parts that are called more often than in another step."""
        return set(self.calls - plain.calls)


def parts(name: str, layers: range = range(LAYERS)) -> set[str]:
    return {f"layers.{layer}.{name}".rstrip(".") for layer in layers}


# What is set, and which parts are called a second time (a layer is known by its first norm).
CASES = {
    "full, one by one": ({"recompute": Recomputation("full", "uniform", 1)}, parts("input_layernorm")),
    "full, in pairs": ({"recompute": Recomputation("full", "uniform", 2)}, parts("input_layernorm")),
    "full, the first two": ({"recompute": Recomputation("full", "block", 2)}, parts("input_layernorm", range(2))),
    "attention core": ({"recompute": Recomputation("selective")}, parts("self_attention.core")),
    "norms": (selective("layernorm"), parts("input_layernorm") | parts("pre_mlp_layernorm")),
    "MLP": (selective("mlp"), parts("mlp") | parts("mlp.linear_fc1") | parts("mlp.linear_fc2")),
    "MLP activation": (selective("mlp_act"), set()),
    "three parts": (
        selective("core_attn", "layernorm", "mlp_act"),
        parts("self_attention.core") | parts("input_layernorm") | parts("pre_mlp_layernorm"),
    ),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", [GPT, Bert])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
def test_the_same_bits_for_fewer_bytes(group, kind, sequence_parallel):
    options = {"sequence_parallel": sequence_parallel} | (LLAMA if kind is GPT and group.size() == 2 else {})
    plain = Step(kind, group, **options)
    for name, (settings, repeated) in CASES.items():
        step = Step(kind, group, **options, **settings)
        assert step.results.keys() == plain.results.keys()
        for what, tensor in plain.results.items():
            assert_bit_equal(step.results[what], tensor, name=f"{name}: {what}")
        assert step.num_bytes < plain.num_bytes, name
        if "full" in name:
            assert repeated == step.repeats(plain) & parts("input_layernorm"), name
        else:
            assert repeated == step.repeats(plain), name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recompute_granularity": "some"}, "must be 'full', 'selective'"),
        (FULL, "recompute_method is None; .* needs 'uniform' or 'block'"),
        (FULL | {"recompute_method": "block"}, "recompute_num_layers is None"),
        (FULL | {"recompute_method": "uniform", "recompute_num_layers": 0}, "at least 1"),
        ({"recompute_method": "uniform"}, "say which layers are recomputed whole"),
        (SELECTIVE | {"recompute_num_layers": 1}, "say which layers are recomputed whole"),
        ({"recompute_modules": ["mlp"]}, "are parts of layers, and recompute_granularity is None"),
        (SELECTIVE | {"recompute_modules": ["mpl"]}, "must name at least one of core_attn, layernorm, mlp, mlp_act"),
        (SELECTIVE | {"recompute_modules": "mlp"}, "must name at least one of"),
        (SELECTIVE | {"recompute_modules": []}, "must name at least one of"),
        (SELECTIVE | {"recompute_modules": ["mlp", "mlp_act"]}, "'mlp_act', which is a part of it"),
        (SELECTIVE | {"recompute_modules": ["layernorm"], "norm_position": "post"}, "write to the residual stream"),
    ],
)
def test_settings_that_contradict_each_other(settings, message):
    with pytest.raises(ConfigError, match=message):
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, **settings)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Recomputation("full", num_layers=2.0), "num-layers is 2.0; it must be an integer"),
        (lambda: Recomputation("selective", modules="mlp"), "modules is 'mlp'; it must be a tuple"),
        (lambda: ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=2, recompute="full"), "give a Recomp"),
    ],
)
def test_recomputation_of_wrong_types_is_refused_when_it_is_made(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_list_of_modules_is_as_good_as_a_tuple():
    listed = Recomputation("selective", modules=["mlp", "layernorm"])
    assert {listed: 1} == {Recomputation("selective", modules=("mlp", "layernorm")): 1}


def test_megatrons_settings_count_when_they_are_set_after_the_config_is_made():
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
    config.recompute_granularity = "selective"
    assert config.recompute == Recomputation("selective")
    config.recompute_granularity, config.recompute_method, config.recompute_num_layers = "full", "block", 2
    config.recompute_modules = None
    assert (
        dataclasses.replace(config, hidden_size=16).recompute == config.recompute == Recomputation("full", "block", 2)
    )
