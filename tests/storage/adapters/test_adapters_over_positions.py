"""Dropout of adapters follows the positions that ranks share: losses and gradients are those of one rank."""

from __future__ import annotations

import pytest
import torch
from models.model_checks import alone, check_gradients
from models.test_context_parallel import batch_of, build, train

from shardwise.core.errors import ConfigError
from shardwise.core.topology import Groups, Topology
from shardwise.models import GPT
from shardwise.models.adapters import LoraConfig
from shardwise.storage.adapters.model import add_lora_
from shardwise.storage.huggingface.architectures import ARCHITECTURES
from shardwise.tensor_parallel.layers import named_param_layouts
from shardwise.training.gradients.finalize import finalize_gradients_

LAYOUTS = {2: ({"cp": 2},), 3: ({"cp": 3},), 4: ({"cp": 2, "tp": 2, "sp": True}, {"cp": 2, "tp": 2})}


def adapted(groups: Groups, *, sequence_parallel: bool = False, targets: str | list[str] = "all-linear") -> GPT:
    model = build("one key-value head", groups, sequence_parallel=sequence_parallel)
    torch.manual_seed(9)
    add_lora_(model, LoraConfig(r=3, lora_dropout=0.3, target_modules=targets), ARCHITECTURES["llama"])
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, param, layout in named_param_layouts(model, groups.tp.size()):
            if name.endswith("lora_B"):
                values = torch.randn(layout.global_shape, generator=generator, dtype=param.dtype)
                param.copy_(layout.take(values, groups.tp.rank()))
    # The other gradients show what the adapters' inputs get.
    return model.requires_grad_(True)


@pytest.mark.ranks(2, 3, 4)
def test_losses_and_gradients_are_those_of_one_rank(group):
    for sizes in LAYOUTS[group.size()]:
        options = dict(sizes)
        sequence_parallel = bool(options.pop("sp", False))
        topology = Topology.create(**options)
        groups, one = Groups.of(topology), alone(topology)
        dense, split = adapted(one), adapted(groups, sequence_parallel=sequence_parallel)
        for length in (29, 4):
            dense.zero_grad()
            split.zero_grad()
            batch = batch_of(0, length)
            (expected,), (actual,) = train(dense, [batch], 1.0), train(split, [batch], 1.0)
            context = split.view_of(length).context
            assert context is not None
            torch.testing.assert_close(actual, context.own(expected, dim=1), rtol=1e-10, atol=1e-10)
            with torch.no_grad():
                assert not torch.allclose(dense.eval()(**batch), expected)
            dense.train()
            finalize_gradients_(split, tp_group=groups.tp, dp_group=groups.dp)
            check_gradients(split, dense, groups, atol=1e-11)


@pytest.mark.ranks(2)
def test_an_adapter_of_the_output_layer_is_refused(group):
    groups = Groups.of(Topology.create(cp=2))
    with pytest.raises(ConfigError, match=r"lora_dropout is 0\.3, lm_head has an adapter, and ranks share samples"):
        adapted(groups, targets=["lm_head"])
