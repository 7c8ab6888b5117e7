"""What one rank cannot run, no rank of its group does: choices of kernels are agreed, once, and replicas stay equal."""

import contextlib
import warnings

import pytest
import torch
import torch.distributed as dist
from harness.model_options import NO_DROPOUT
from harness.parity import assert_bit_equal, gather_all
from run.tiny import tiny_settings

from shardwise.core.communication.context import context_of
from shardwise.core.topology import Groups
from shardwise.kernels import compiled, dispatch
from shardwise.models.config import ModelConfig
from shardwise.models.gpt import GPT
from shardwise.run.banner import speed
from shardwise.run.processes.ranks import Ranks
from shardwise.run.session import open_session


@contextlib.contextmanager
def nothing_known(monkeypatch):
    """Let nothing be known of compilers or agreed before, and nothing be left of what is agreed."""
    monkeypatch.setattr(context_of(dist.group.WORLD), "agreed_kernels", set())
    for path in dispatch.PATHS:
        for name, value in (("refusal", None), ("is_agreed", False)):
            monkeypatch.setattr(path, name, value)
    caches = compiled.compile_c, compiled.why_no_compiler
    for cached in caches:
        cached.cache_clear()
    try:
        yield
    finally:
        for cached in caches:
            cached.cache_clear()


@pytest.mark.ranks(2)
def test_norms_of_a_rank_without_a_compiler_are_those_of_the_others(group, monkeypatch):
    with nothing_known(monkeypatch):
        if group.rank() == 1:
            monkeypatch.setattr(compiled, "_compiler", lambda: None)
        own = dist.new_group([0, 1])
        config = ModelConfig(
            num_layers=1, hidden_size=512, num_attention_heads=2, normalization="RMSNorm", **NO_DROPOUT
        )
        torch.manual_seed(3)
        model = GPT(config, 11, 128, groups=Groups(tp=own))
        normed = []
        model.decoder.layers[0].input_layernorm.register_forward_hook(lambda norm, _, output: normed.append(output))
        ids = torch.arange(128).view(1, 128) % 11
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(ids, labels=ids).sum().backward()
        for tensor in (*normed, *(norm.weight.grad for norm in model.modules() if isinstance(norm, torch.nn.RMSNorm))):
            for other in gather_all(tensor, group):
                assert_bit_equal(other, tensor)
        lines = [str(warning.message) for warning in caught]
        assert bool(lines) == (group.rank() == 0)
        assert all("off on all ranks of the group, since rank 1 of 2, on " in line for line in lines)
        why = dispatch.ELEMENTWISE.why_not(dispatch.Call("cpu", torch.float32))
        assert "rank 1 of 2" in why
        assert "cannot run it: no C compiler" in why
        # Once: a later pass asks nobody.
        monkeypatch.setattr(dispatch, "gather_objects", None)
        model(ids)


@pytest.mark.ranks(2)
def test_a_run_agrees_at_its_start_and_its_banner_says_so(group, monkeypatch, tmp_path):
    """Data-parallel ranks too, which exchange no activations; and no warning says it a second time."""
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    with nothing_known(monkeypatch):
        if group.rank() == 1:
            monkeypatch.setattr(compiled, "_compiler", lambda: None)
        settings = tiny_settings(tmp_path, model={"num_layers": 1, "hidden_size": 128, "sequence_length": 256})
        session = open_session(settings, Ranks(group.rank(), group.rank(), 2, torch.device("cpu")))
        assert "\n       no compiled SwiGLU, rotary and RMSNorm: rank 1 of 2, on " in speed(session)
        assert "cannot run it: no C compiler: neither $CC nor cc, gcc or clang is there" in speed(session)
