"""The balance loss of a folder that asks for one is that of transformers, over all layers: value and all gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hf_references import Reference, make_balanced
from test_parity_with_transformers import gathered_gradients

from shardwise.core.communication.collectives import all_reduce
from shardwise.core.errors import ConfigError
from shardwise.core.topology import Groups, Topology
from shardwise.models import Recomputation
from shardwise.models.experts.moe import MoELayer
from shardwise.storage.huggingface import config_from_json, config_to_json, load_pretrained
from shardwise.training.gradients.finalize import finalize_gradients_

FAMILIES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "granitemoe"]
# transformers has scores, norms and angles in fp32.
RTOL = 2e-6
LAYOUTS: dict[int, list[tuple[dict[str, int], dict[str, Any]]]] = {
    1: [({}, {}), ({}, {"recompute": Recomputation("full", "uniform", 2)})],
    2: [
        ({"tp": 2}, {"sequence_parallel": True}),
        ({"tp": 2, "ep": 2, "etp": 1}, {}),
        ({"ep": 2}, {"recompute": Recomputation("selective", modules=("mlp",))}),
        ({"cp": 2}, {}),
    ],
    4: [({"tp": 2, "ep": 2}, {"sequence_parallel": True})],
}


@pytest.fixture
def balanced(request: pytest.FixtureRequest, tmp_path: Path) -> Reference:
    """A folder of the family that the parameter names."""
    return make_balanced(request.param, tmp_path)


@pytest.mark.slow
@pytest.mark.sample(6)
@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("balanced", FAMILIES, indirect=True)
def test_the_loss_is_pooled_over_layers(group: dist.ProcessGroup, balanced: Reference) -> None:
    """Data-parallel ranks have parts of the batch that transformers has on one rank."""
    expected = balanced.values()
    for sizes, options in LAYOUTS[group.size()]:
        groups = Groups.of(Topology.create(**sizes))
        place, number = groups.data.samples
        rows = slice(place * 4 // number, (place + 1) * 4 // number)
        ids, mask, labels = (expected[name][rows] for name in ("input_ids", "mask", "labels"))
        model = load_pretrained(balanced.folder, groups=groups, **options).train()
        layers = [each for each in model.modules() if isinstance(each, MoELayer)]
        for layer in layers:
            layer.begin(1.0 / number)
        loss = model(ids, attention_mask=mask, labels=labels).sum() / (expected["labels"] != -100).sum()
        loss.backward()
        finalize_gradients_(
            model, tp_group=groups.tp, dp_group=groups.dp, embd_group=groups.embd, expert_dp_group=groups.expert_dp
        )
        balance = sum(layer.statistics[-1] for layer in layers) / number
        for each, over in ((loss.detach(), [groups.dp]), (balance, [groups.tp, groups.dp])):
            for other in over:
                each = each if other is None else all_reduce(each, group=other)
            wanted = expected["loss" if over == [groups.dp] else "balance"]
            torch.testing.assert_close(each, wanted, rtol=RTOL, atol=0.0, check_dtype=False)
        gradients = gathered_gradients(model, balanced)
        wanted = {name.removeprefix("gradient."): each for name, each in expected.items() if "gradient." in name}
        assert gradients.keys() == wanted.keys()
        norm = torch.stack([each.norm() for each in wanted.values()]).norm()
        for name, gradient in gradients.items():
            error = float((gradient - wanted[name]).norm() / norm)
            assert error <= RTOL, f"gradient of {name} with {sizes}: {error:.2e} of the norm"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("balanced", ["mixtral"], indirect=True)
def test_several_stages_are_refused(group: dist.ProcessGroup, balanced: Reference) -> None:
    groups = Groups.of(Topology.create(pp=2))
    with pytest.raises(ConfigError, match=r"pools_layers is for layers on one stage, and there are 2 pipeline stages"):
        load_pretrained(balanced.folder, groups=groups)


def test_what_a_folder_says_of_its_loss() -> None:
    asks = {"model_type": "mixtral", "output_router_logits": True}
    experts = config_from_json(asks | {"router_aux_loss_coef": 0.25}).description.experts
    assert experts is not None
    assert (experts.pools_layers, experts.aux_loss, experts.balances) == (True, 0.25, "global")
    written = config_to_json(config_from_json(asks | {"router_aux_loss_coef": 0.25}).description)
    assert (written["output_router_logits"], written["router_aux_loss_coef"]) == (True, 0.25)
    # transformers adds no such loss for these models.
    without = (
        asks | {"router_aux_loss_coef": 0.0},
        {"model_type": "deepseek_v3", "output_router_logits": True},
        {"model_type": "mixtral"},
    )
    for fields in without:
        experts = config_from_json(fields).description.experts
        assert experts is not None
        assert (experts.pools_layers, experts.aux_loss) == (False, 0.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_of_coefficients_are_those_of_transformers(family: str) -> None:
    import transformers

    theirs = transformers.AutoConfig.for_model(family).router_aux_loss_coef
    experts = config_from_json({"model_type": family, "output_router_logits": True}).description.experts
    assert experts is not None
    assert experts.aux_loss == theirs
