"""Exact runs with adapters have the same bits at every layout."""

import pytest
import torch
from run.test_exact_runs import LENGTH, VOCAB, ZERO_BUBBLE, alone_of, check, settings_of

from shardwise.core.errors import ConfigError
from shardwise.core.topology import Topology
from shardwise.exact.products import ExactProducts
from shardwise.models.adapters import LoraConfig
from shardwise.models.adapters.lora_layers import LoraLinear
from shardwise.run.build import build_model
from shardwise.run.exact import layer_trials
from shardwise.run.exact.trials import check_device
from shardwise.storage.adapters import add_lora_
from shardwise.storage.huggingface.architectures import ARCHITECTURES

CONFIG = {
    "r": 4,
    "lora_dropout": 0.1,
    "target_modules": ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "lm_head"),
    "alpha_pattern": {"v_proj": 3},
    "rank_pattern": {"gate_proj": 17},
    "bias": "all",
    "modules_to_save": ("embed_tokens", "post_attention_layernorm"),
}


def adapted(model, **options):
    torch.manual_seed(5)
    add_lora_(model, LoraConfig(**CONFIG | options), ARCHITECTURES["llama"])
    # 0 at first, so that one factor would have no gradient.
    for layer in model.modules():
        if isinstance(layer, LoraLinear):
            for adapter in layer.lora.values():
                torch.nn.init.constant_(adapter.lora_B, 0.01)


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.matrix), "bfloat16"])
def test_adapters(group, dtype):
    layouts = [
        {},
        {"tp": 4},
        {"tp": 2, "sequence_parallel": True, "recompute": {"granularity": "full"}},
        {"tp": 2} | ZERO_BUBBLE,
    ]
    check("llama", layouts, adapted, dtype=dtype)


@pytest.mark.ranks(1)
def test_what_has_no_exact_form_is_refused(group):
    for options, message in (
        ({"use_dora": True}, "use_dora has no exact form"),
        (
            {"target_modules": ("embed_tokens",), "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": ()},
            "on the embedding has no",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            check("llama", [], lambda model, options=options: adapted(model, **options))


@pytest.mark.ranks(1)
def test_products_of_adapters_are_tried_first(group, monkeypatch):
    groups = alone_of(Topology.create(tp=1))
    model = build_model(settings_of("llama"), VOCAB, groups=groups, device=torch.device("cpu"))
    adapted(model)
    check_device(model, micro_batch_size=1, sequence_length=LENGTH)
    product = ExactProducts.linear

    def otherwise(self, *given):
        # As a library does that takes another way for narrow matrices.
        return product(self, *given) * (len(self.parts) if self.is_narrow else 1)

    by_rows = layer_trials.linear_by_parts
    with monkeypatch.context() as patch:
        # As a library does whose threads share a sum.
        patch.setattr(layer_trials, "linear_by_parts", lambda *given: by_rows(*given) * torch.get_num_threads())
        message = r"the product with an adapter's factor \[64, 4\], \[16, 1, 4\], on one thread, has other bits"
        with pytest.raises(ConfigError, match=message):
            check_device(model, micro_batch_size=1, sequence_length=LENGTH)
    monkeypatch.setattr(ExactProducts, "linear", otherwise)
    with pytest.raises(ConfigError, match=r"the product for the output of a linear layer, \[16, 64\] by \[4, 64\]"):
        check_device(model, micro_batch_size=1, sequence_length=LENGTH)
