"""Lowered rotary frequencies are those of the papers, and of Hugging Face where it is installed."""

from __future__ import annotations

import math

import pytest
import torch
from harness.on_pretended_gpu import StepRecorder, fake_tensors, join
from harness.parity import assert_close_to, assert_unmodified

from shardwise.core.errors import ConfigError
from shardwise.core.topology import Groups
from shardwise.kernels.elementwise import rotate
from shardwise.models.config import ModelConfig
from shardwise.models.gpt import GPT
from shardwise.models.transformer.rotary import RotaryEmbedding, RotaryScaling

LLAMA3 = {"factor": 8.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"factor": 8.0, "original_max_position_embeddings": 64}
CASES = [
    ("linear", {"factor": 3.0}),
    ("proportional", {"factor": 2.0, "partial_rotary_factor": 0.4}),
    ("llama3", LLAMA3),
    ("yarn", YARN),
    ("yarn", YARN | {"truncate": False, "mscale": 0.7, "mscale_all_dim": 1.3}),
    ("yarn", YARN | {"attention_factor": 1.7, "beta_fast": 20.0, "beta_slow": 2.0}),
]


@pytest.mark.parametrize(("kind", "options"), CASES, ids=[f"{kind}{i}" for i, (kind, _) in enumerate(CASES)])
@pytest.mark.parametrize("width", [6, 64])
@pytest.mark.filterwarnings("ignore")
def test_frequencies_are_those_of_transformers(kind, options, width):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        hidden_size=2 * width,
        num_attention_heads=2,
        max_position_embeddings=512,
        rope_parameters={"rope_type": kind, "rope_theta": 1000.0, **options},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config)
    rotary = RotaryEmbedding(width, rotary_base=1000.0, rope_scaling=RotaryScaling(kind, **options))
    assert_close_to(rotary.inverse_frequencies, frequencies.double(), rtol_of_norm=1e-6)
    cos, sin = rotary(torch.tensor([0, 7]), torch.float64)
    assert_close_to(cos[1, 0, 0], (7 * rotary.inverse_frequencies).cos() * factor, rtol_of_norm=1e-12)
    assert_close_to(sin[1, 0, 0], (7 * rotary.inverse_frequencies).sin() * factor, rtol_of_norm=1e-12)


@pytest.mark.parametrize("length", [40, 64, 65, 200])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.filterwarnings("ignore")
def test_frequencies_that_depend_on_the_length_are_those_of_transformers(kind, length):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    lists = {"short_factor": [1.0, 1.25, 2.0], "long_factor": [1.5, 3.0, 9.0]} if kind == "longrope" else {}
    config = transformers.LlamaConfig(
        hidden_size=12,
        num_attention_heads=2,
        max_position_embeddings=64,
        rope_parameters={"rope_type": kind, "rope_theta": 1000.0, "factor": 4.0, **lists},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, seq_len=length)
    scaling = RotaryScaling(kind, 4.0, 64, **{name: tuple(values) for name, values in lists.items()})
    rotary = RotaryEmbedding(6, rotary_base=1000.0, rope_scaling=scaling)
    positions = torch.tensor([0, 7])
    cos, sin = rotary(positions, torch.float64, length=length)
    # As a number on the device too, for which the host need not wait.
    for own, other in zip((cos, sin), rotary(positions, torch.float64, length=torch.tensor(length)), strict=True):
        assert_close_to(own, other, rtol_of_norm=1e-15)
    assert_close_to(cos[1, 0, 0], (7 * frequencies.double()).cos() * factor, rtol_of_norm=1e-6)
    assert_close_to(sin[1, 0, 0], (7 * frequencies.double()).sin() * factor, rtol_of_norm=1e-6)


def test_longrope_of_other_widths():
    lists = {"short_factor": (1.0, 1.5), "long_factor": (2.0, 3.0)}
    with pytest.raises(ConfigError, match=r"2 factors, and 3 frequencies"):
        RotaryEmbedding(6, rope_scaling=RotaryScaling("longrope", 4.0, 64, **lists))
    with pytest.raises(ConfigError, match=r"long_factor of rotary scaling is \(\)"):
        RotaryScaling("longrope", 4.0, 64, short_factor=(1.0,), long_factor=())


def test_llama3_by_hand():
    """Of 64 positions, frequencies of over 4 turns stay, those of under 1 are divided, 2.5 turns are half-way."""
    scaling = RotaryScaling("llama3", **LLAMA3)
    turns = torch.tensor([10.0, 4.0, 2.5, 1.0, 0.1], dtype=torch.float64)
    scaled = scaling.scale(turns * 2 * math.pi / 64, 1.0) * 64 / (2 * math.pi)
    assert_close_to(scaled, torch.tensor([10.0, 4.0, 2.5 * (0.5 + 0.5 / 8), 0.125, 0.0125]).double(), rtol_of_norm=1e-7)


def test_yarn_lengthens_cosine_and_sine():
    yarn = RotaryScaling("yarn", 4.0, 64)
    assert yarn.cos_sin_factor == 0.1 * math.log(4) + 1
    assert RotaryScaling("yarn", 1.0, 64).cos_sin_factor == 1.0
    assert RotaryScaling("linear", 4.0).cos_sin_factor == 1.0


def test_queries_grow_with_each_original_context():
    rotary = RotaryEmbedding(6, rope_scaling=RotaryScaling("yarn", 4.0, 3, llama_4_scaling_beta=0.5))
    like = torch.empty(0, dtype=torch.float64)
    scale = rotary.query_scale(None, 8, like)
    contexts = [0, 0, 0, 1, 1, 1, 2, 2]
    assert scale[:, 0, 0, 0].tolist() == [pytest.approx(1 + 0.5 * math.log(1 + each), abs=1e-15) for each in contexts]
    rows = torch.tensor([[0, 1, 2], [5, 6, 7]])
    assert torch.equal(rotary.query_scale(rows, 3, like), scale[rows.t(), 0, 0, 0][:, :, None, None])
    assert RotaryEmbedding(6, rope_scaling=RotaryScaling("yarn", 4.0, 3)).query_scale(None, 8, like) is None


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_rotation_and_its_gradient(interleaved, share):
    """With YaRN's factor the map is no rotation, and its gradient still the transpose."""
    rotary = RotaryEmbedding(10, share, rope_scaling=RotaryScaling("yarn", 8.0, 16))(torch.arange(5), torch.float64)
    x = torch.randn(5, 2, 3, 10, dtype=torch.float64, requires_grad=True)
    with assert_unmodified(x=x, cos=rotary[0], sin=rotary[1]):
        torch.autograd.gradcheck(lambda x: rotate(x, *rotary, interleaved=interleaved), x)
    rotated = int(10 * share) // 2 * 2
    y = rotate(x, *rotary, interleaved=interleaved)
    assert torch.equal(y[..., rotated:], x[..., rotated:])
    assert share == 0.0 or not torch.equal(y[..., :rotated], x[..., :rotated])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"kind": "cubic", "factor": 2.0},
            "rotary scaling is 'cubic'; it must be one of linear, proportional, dynamic",
        ),
        ({"kind": "dynamic", "factor": 2.0}, "'dynamic' needs original_max_position_embeddings, .* got None"),
        ({"kind": "linear", "factor": 0.5}, "factor of rotary scaling is 0.5; it must be at least 1"),
        ({"kind": "linear", "factor": math.nan}, "factor of rotary scaling is nan"),
        ({"kind": "yarn", "factor": 2.0}, "'yarn' needs original_max_position_embeddings, .* got None"),
        (
            {"kind": "llama3"} | LLAMA3 | {"high_freq_factor": 1.0},
            "low_freq_factor 1.0 and high_freq_factor 1.0 of rotary scaling must be over 0 and ascending",
        ),
        (
            {"kind": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "beta_slow": 0.0},
            "beta_slow 0.0 and beta_fast 32.0",
        ),
        (
            {"kind": "yarn", "factor": 2.0, "original_max_position_embeddings": 8, "llama_4_scaling_beta": -0.1},
            "llama_4_scaling_beta of rotary scaling of kind 'yarn' is -0.1; it must be at least 0",
        ),
        ({"kind": "proportional", "partial_rotary_factor": 0.0}, "is 0.0; it must be over 0 and at most 1"),
        ({"kind": "linear", "partial_rotary_factor": 0.5}, "is 0.5; .* and 1 for kinds other than 'proportional'"),
        ({"kind": "linear", "factor": 2.0, "llama_4_scaling_beta": 0.1}, "is 0.1; .* 0 for kinds other than 'yarn'"),
    ],
)
def test_scaling_that_cannot_be(options, message):
    with pytest.raises(ConfigError, match=message):
        RotaryScaling(**options)


@pytest.mark.parametrize(("percent", "base"), [(1.5, 10000.0), (-0.1, 10000.0), (1.0, 1.0)])
def test_rotation_that_cannot_be(percent, base):
    with pytest.raises(ConfigError, match=f"rotary_percent {percent} must be from 0 to 1, and rotary_base {base} over"):
        RotaryEmbedding(8, percent, base)


def on_the_gpu(kind):
    scaling = RotaryScaling(kind, 4.0, 8, short_factor=(1.0, 1.5), long_factor=(2.0, 3.0))
    group = join("cuda:fake")
    with fake_tensors():
        config = ModelConfig(
            num_layers=1, hidden_size=8, num_attention_heads=2, hidden_dropout=0.0, attention_dropout=0.0
        )
        options = {"position_embedding_type": "rope", "rope_scaling": scaling}
        model = GPT(config, vocab_size=11, max_sequence_length=16, groups=Groups(tp=group), **options)
        tokens = torch.zeros(2, 12, dtype=torch.int64, device="cuda")
        positions = torch.arange(12, device="cuda").expand(2, 12)
        model(tokens, position_ids=positions)
        with StepRecorder() as recorder, torch.no_grad():
            model(tokens, position_ids=positions)
            model(tokens, position_ids=positions, document_ids=positions // 5)
            model(tokens, lengths=positions[:, 9])
            model(tokens[:, :1], position_ids=positions[:, :1])
    return recorder.waits, recorder.copies


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_nobody_waits_for_the_length_of_a_sequence(pretended_gpu, kind):
    assert pretended_gpu(on_the_gpu, kind) == ({}, {})
