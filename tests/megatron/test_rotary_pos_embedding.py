"""Rotary angles by Megatron's names, against the formula."""

import pytest
import torch
from harness.parity import assert_close_to

from shardwise.core.errors import ConfigError
from shardwise.megatron.config import TransformerConfig
from shardwise.megatron.packed_seq_params import PackedSeqParams
from shardwise.megatron.rotary_pos_embedding import MultimodalRotaryEmbedding, RotaryEmbedding, apply_rotary_pos_emb

D = 6


def config_of(**settings):
    return TransformerConfig(num_layers=1, hidden_size=12, num_attention_heads=2, **settings)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("percent", [1.0, 0.7])
def test_angles_and_rotation(interleaved, percent):
    rotated = 6 if percent == 1.0 else 4
    made = RotaryEmbedding(D, percent, interleaved, seq_len_interpolation_factor=2.0, rotary_base=100)
    angles = made(5, offset=3)
    frequencies = 100.0 ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    expected = torch.arange(3, 8, dtype=torch.float64)[:, None] / 2.0 * frequencies
    assert_close_to(made.inv_freq, frequencies, rtol_of_norm=1e-15)
    assert_close_to(made.get_freqs_non_repeated(5, 3), expected.float(), rtol_of_norm=1e-7)
    # Each pair as a complex number, turned.
    heads = torch.randn(5, 2, 2, D, dtype=torch.float64)
    part = heads[..., :rotated]
    first, second = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    turned = torch.complex(first, second) * torch.polar(torch.ones(()).double(), expected)[:, None, None, :]
    pairs = (turned.real, turned.imag)
    whole = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    result = apply_rotary_pos_emb(heads, angles, config_of(rotary_interleaved=interleaved))
    assert_close_to(result, torch.cat((whole, heads[..., rotated:]), -1), rtol_of_norm=1e-6)
    halved = apply_rotary_pos_emb(heads, angles, config_of(rotary_interleaved=interleaved), mscale=0.5)
    assert_close_to(halved[..., :rotated], whole / 2, rtol_of_norm=1e-6)


def test_of_a_packed_row_each_sequence_begins_anew():
    angles, heads = RotaryEmbedding(D, 1.0)(4), torch.randn(7, 2, D, dtype=torch.float64)
    row = apply_rotary_pos_emb(heads, angles, config_of(), torch.tensor([0, 3, 7]))
    for start, stop in ((0, 3), (3, 7)):
        alone = apply_rotary_pos_emb(heads[start:stop].unsqueeze(1), angles[: stop - start], config_of())
        assert_close_to(row[start:stop], alone.squeeze(1), rtol_of_norm=1e-15)


def test_lengths_and_the_scaling_of_llama_3():
    made, hidden = RotaryEmbedding(D, 1.0), torch.zeros(4, 1, 12)
    assert made.get_rotary_seq_len(None, None, hidden, config_of()) == 4
    split = config_of(tensor_model_parallel_size=2, sequence_parallel=True)
    assert made.get_rotary_seq_len(None, None, hidden, split) == 8
    packed = PackedSeqParams(cu_seqlens_q=torch.tensor([0, 1, 4]), max_seqlen_q=3)
    assert made.get_rotary_seq_len(None, None, hidden, config_of(), packed) == 3
    scaled = RotaryEmbedding(128, 1.0, rotary_base=500000, rope_scaling=True)
    plain = RotaryEmbedding(128, 1.0, rotary_base=500000)
    # Those that turn often stay, those that turn seldom are divided by 8.
    ratio = plain.inv_freq / scaled.inv_freq
    assert_close_to(ratio[:10], torch.ones(10, dtype=torch.float64), rtol_of_norm=1e-12)
    assert_close_to(ratio[-10:], torch.full((10,), 8.0, dtype=torch.float64), rtol_of_norm=1e-12)


@pytest.mark.ranks(2)
def test_ranks_that_share_a_sequence_are_refused(group):
    with pytest.raises(ConfigError, match="cp_group has 2 ranks, and attention here needs the whole sequence"):
        RotaryEmbedding(D, 1.0, cp_group=group)
    with pytest.raises(ConfigError, match="MultimodalRotaryEmbedding is not offered here: positions have one coordin"):
        MultimodalRotaryEmbedding(D, 1.0)
