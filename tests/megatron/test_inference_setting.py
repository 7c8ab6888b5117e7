"""``use_inference_optimized_layers`` and ``inference_fuse_tp_communication``: what a GPT does with them, and when."""

import copy

import pytest
import torch
from harness.parity import assert_bit_equal, assert_close_to
from models.generation.test_generation import make_model
from models.test_gpt import Shape

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.errors import ConfigError
from shardwise.core.topology import Topology
from shardwise.megatron.config import TransformerConfig
from shardwise.megatron.models.gpt import GPTModel
from shardwise.megatron.process_groups_config import ProcessGroupCollection
from shardwise.models.transformer.layer import TransformerLayerSpec


def made(group, *, fuse=True, **options):
    return make_model(
        Shape(), group, use_inference_optimized_layers=True, inference_fuse_tp_communication=fuse, **options
    )


@pytest.mark.ranks(1, 2, 3, slow=(1,))
@pytest.mark.parametrize("fuse", [False, True])
def test_evaluation_mode_uses_layers_for_inference(group, fuse):
    split = group.size() > 1
    model = made(group, fuse=fuse, sequence_parallel=split)
    plain = make_model(Shape(), group, sequence_parallel=split)
    ids = torch.randint(101, (2, 13))
    assert_bit_equal(model(ids), plain(ids))
    assert model(ids).requires_grad
    model.eval()
    with CollectiveCounter() as counter:
        logits = model(ids)
    assert not logits.requires_grad
    assert_close_to(logits, plain(ids).detach(), rtol_of_norm=1e-12)
    assert_close_to(model(ids, labels=ids), plain(ids, labels=ids).detach(), rtol_of_norm=1e-12)
    names = [launch.name for launch in counter.launches]
    assert names.count("reduce_scatter") == (4 if split and not fuse else 0)
    assert model.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.ranks(2)
def test_what_is_loaded_or_converted_is_what_is_used(group):
    model, other = made(group).eval(), made(group)
    ids = torch.randint(101, (2, 5))
    model(ids)
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(0.9)
        expected = other(ids)
    # Parameters are replaced, not written to.
    model.load_state_dict({name: tensor.clone() for name, tensor in other.state_dict().items()}, assign=True)
    assert_close_to(model(ids), expected, rtol_of_norm=1e-12)
    assert_close_to(copy.deepcopy(model)(ids), expected, rtol_of_norm=1e-12)
    assert model.float()(ids).dtype == torch.float32


@pytest.mark.ranks(2)
def test_what_is_set_later_counts(group):
    model, ids = made(group).eval(), torch.randint(101, (2, 5))
    part = model(ids)
    model.parallel_output = False
    assert model(ids).size(-1) == 101
    model.parallel_output = True
    assert_bit_equal(model(ids), part)


@pytest.mark.ranks(2)
def test_stages_take_what_the_one_before_them_gives(group):
    """On one rank of two stages each, by hand."""
    topology = Topology.create(pp=2)
    groups = ProcessGroupCollection(tp=topology.group("tp"), pp=group, embd=group)
    first = group.rank() == 0
    models = []
    for options in ({}, {"use_inference_optimized_layers": True}):
        config = TransformerConfig(
            num_layers=2,
            hidden_size=8,
            num_attention_heads=2,
            params_dtype=torch.float64,
            pipeline_model_parallel_size=2,
            **options,
        )
        torch.manual_seed(1)
        spec = TransformerLayerSpec()
        models.append(GPTModel(config, spec, 20, 16, pre_process=first, post_process=not first, pg_collection=groups))
    ids = torch.randint(20, (2, 5))
    for hidden in torch.randn(2, 5, 2, 8, dtype=torch.float64):
        outputs = []
        for model in models:
            model.eval()
            model.set_input_tensor(None if first else hidden)
            outputs.append(model(ids))
        assert_close_to(outputs[1], outputs[0].detach(), rtol_of_norm=1e-12)


@pytest.mark.ranks(2)
def test_settings_that_cannot_be(group):
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    with pytest.raises(ConfigError, match="use_inference_optimized_layers is not; set both"):
        TransformerConfig(inference_fuse_tp_communication=True, **sizes)
    with pytest.raises(ConfigError, match="another norm_position than 'pre'"):
        made(group, fuse=False, norm_position="post")
    with pytest.raises(ConfigError, match="needs a norm after the last layer"):
        made(group, final_layernorm=False)
