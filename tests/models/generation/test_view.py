"""A model on layers for inference computes what the model does, on its weights, with the collectives that it says."""

import copy

import pytest
import torch
from harness.parity import assert_bit_equal, assert_close_to
from models.generation.test_generation import make_model
from models.test_gpt import SHAPES, Shape

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.communication.symmetric_memory import GlobalSymmetricMemoryBuffer
from shardwise.core.errors import ConfigError
from shardwise.models.generation import PreallocatedCache, Sampling, generate, inference_view, on_layers


def logits_of(model, ids, chunks=(13,)):
    cache = PreallocatedCache.for_model(model, batch_size=len(ids), capacity=sum(chunks))
    pieces = []
    for count in chunks:
        positions = torch.arange(cache.length, cache.length + count)
        pieces.append(model(ids[:, cache.length : cache.length + count], positions, cache=cache))
    return torch.cat(pieces, dim=1)


@pytest.mark.ranks(1, 2, 3, 4, slow=(4,))
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_view_computes_what_the_model_does(group, sequence_parallel):
    """A prompt, and one token at a time: fewer than ranks."""
    for shape in SHAPES.values():
        model = make_model(shape, group, sequence_parallel=sequence_parallel).eval()
        ids = torch.randint(shape.vocab, (3, 13))
        with torch.no_grad():
            expected = logits_of(model, ids)
            loss = model(ids[:, :-1], labels=ids[:, 1:])
        for fused in (False, True):
            view = inference_view(model, fused=fused)
            with torch.no_grad(), CollectiveCounter() as counter:
                actual = logits_of(view, ids)
            assert_close_to(actual, expected, rtol_of_norm=1e-12)
            with torch.no_grad():
                in_pieces, view_loss = logits_of(view, ids, (10, 1, 2)), view(ids[:, :-1], labels=ids[:, 1:])
            assert_close_to(in_pieces, expected, rtol_of_norm=1e-12)
            assert_close_to(view_loss, loss, rtol_of_norm=1e-12)
            check_collectives([launch.name for launch in counter.launches], model, fused=fused)


def check_collectives(names, model, *, fused):
    halves = 2 * len(model.decoder.layers)
    if model.tp_group.size() == 1:
        assert names == []
        return
    # The first is the embedding's.
    if not model.sequence_parallel:
        assert names[1:] == ["all_reduce"] * halves
    elif fused:
        assert names[1:] == ["all_gather"] + ["all_reduce"] * halves
    else:
        assert names[1:] == ["all_gather", "reduce_scatter"] * halves + ["all_gather"]


@pytest.mark.ranks(2)
def test_the_view_has_the_weights_of_the_model(group):
    model = make_model(Shape(), group)
    view = inference_view(model, fused=True)
    assert dict(view.named_parameters()).keys() == dict(model.named_parameters()).keys()
    for name, param in view.named_parameters():
        assert param is model.get_parameter(name)
    assert view.state_dict().keys() == model.state_dict().keys()
    assert view.sharded_state_dict().keys() == model.sharded_state_dict().keys()
    ids = torch.randint(101, (1, 5))
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.9)
        model.eval()
        assert_close_to(view(ids), model(ids), rtol_of_norm=1e-12)
    model.train()
    # Training goes on as before.
    model(ids, labels=ids).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
    assert model.decoder.layers[0].training
    copied = copy.deepcopy(view)
    with torch.no_grad():
        expected = view(ids)
        for param in model.parameters():
            param.zero_()
        assert_bit_equal(copied(ids), expected)


@pytest.mark.ranks(1, 2, 3)
def test_the_view_generates_the_same_text(group):
    model = make_model(SHAPES["llama-grouped"], group)
    expected = generate(model, [5, 6, 7], max_new_tokens=20, sampling=Sampling(), seed=4)
    for fused in (False, True):
        view = inference_view(model, fused=fused)
        assert generate(view, [5, 6, 7], max_new_tokens=20, sampling=Sampling(), seed=4) == expected


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_without_memory_for_it_the_fused_view_computes_the_same(group, sequence_parallel, monkeypatch):
    model = make_model(Shape(), group, sequence_parallel=sequence_parallel).eval()
    ids = torch.randint(101, (2, 13))
    view = inference_view(model, fused=True)
    monkeypatch.setattr(
        GlobalSymmetricMemoryBuffer, "maybe_get_tensor", lambda self, shape, dtype: {"tensor": None, "handle": None}
    )
    with torch.no_grad():
        assert_close_to(view(ids), model(ids), rtol_of_norm=1e-12)


@pytest.mark.ranks(2)
def test_layers_that_are_asked_for(group):
    model = make_model(Shape(), group)
    assert on_layers(model, "training") == (model, "those of training, as asked for")
    view, said = on_layers(model, "auto")
    assert not view.decoder.fused
    assert said == "those for inference, which are faster than those of training"
    view, said = on_layers(model, "inference")
    assert not view.decoder.fused
    assert said == "those for inference, as asked for; exchange of a half block: row"
    view, said = on_layers(model, "fused")
    assert view.decoder.fused
    assert said.startswith("those for inference, as asked for; exchange of a half block: fused, ")
    model = make_model(Shape(), group, norm_position="post")
    kept, said = on_layers(model, "auto")
    assert kept is model
    assert said.startswith("those of training, since layers for inference add to what was normed")
    with pytest.raises(ConfigError, match="another norm_position than 'pre'"):
        on_layers(model, "fused")
    with pytest.raises(ConfigError, match="and layer_scalar True does otherwise"):
        on_layers(make_model(Shape(), group, layer_scalar=True), "inference")


@pytest.mark.ranks(2)
def test_models_that_have_no_view(group):
    model = make_model(Shape(), group, norm_position="post")
    for fused in (False, True):
        with pytest.raises(ConfigError, match="norm_position than 'pre', apply_residual"):
            inference_view(model, fused=fused)
    model = make_model(Shape(), group, final_layernorm=False)
    inference_view(model, fused=False)
    with pytest.raises(ConfigError, match="needs a norm after the last layer, on this stage"):
        inference_view(model, fused=True)

    class Adapted(type(model.decoder.layers[0].mlp.linear_fc2)):
        pass

    model = make_model(Shape(), group)
    model.decoder.layers[1].mlp.linear_fc2.__class__ = Adapted
    with pytest.raises(ConfigError, match="is made from a RowLinear, and this layer is of another class, Adapted; use"):
        inference_view(model, fused=False)
