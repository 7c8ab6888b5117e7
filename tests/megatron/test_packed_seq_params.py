"""Sequences packed into one row, as Megatron describes them: each gives what it gives alone."""

import pytest
import torch
from harness.model_options import NO_DROPOUT
from harness.parity import assert_close_to

from shardwise import parallel_state
from shardwise.core.errors import ConfigError, ShardingError
from shardwise.megatron.config import TransformerConfig
from shardwise.megatron.layer_specs import get_gpt_layer_local_spec
from shardwise.megatron.models.gpt import GPTModel
from shardwise.megatron.packed_seq_params import PackedSeqParams
from shardwise.megatron.transformer_layer import TransformerLayer

V, S = 23, 16
LENGTHS, PADDED = (3, 5, 1), (4, 5, 3)


def starts(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)


def params(**fields):
    return PackedSeqParams(**{"qkv_format": "thd", "cu_seqlens_q": starts(LENGTHS)} | fields)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("position_embedding_type", ["rope", "learned_absolute", "alibi"])
@pytest.mark.parametrize("padded", [False, True])
def test_each_sequence_gives_what_it_gives_alone(group, position_embedding_type, padded):
    parallel_state.initialize_model_parallel(2)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=12,
        num_attention_heads=3,
        params_dtype=torch.float64,
        init_method_std=0.4,
        **NO_DROPOUT,
        tensor_model_parallel_size=2,
        sequence_parallel=padded,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), V, S, position_embedding_type=position_embedding_type)
    places = PADDED if padded else LENGTHS
    fields = {"cu_seqlens_q_padded": starts(PADDED), "cu_seqlens_kv": starts(LENGTHS)} if padded else {}
    # The row is longer than its sequences.
    ids = torch.randint(V, (1, sum(places) + 2), generator=torch.Generator().manual_seed(1))
    packed = model(ids, packed_seq_params=params(**fields))
    # Positions that go on through the row are of no use to rotary embeddings.
    if position_embedding_type == "rope":
        assert torch.equal(model(ids, torch.arange(ids.size(1)), packed_seq_params=params(**fields)), packed)
    for place, start, length in zip(range(3), starts(places), LENGTHS, strict=False):
        alone = model(ids[:, start : start + length])
        assert_close_to(packed[:, start : start + length], alone, rtol_of_norm=1e-12, name=f"sequence {place}")
        if start:
            apart = (packed - model(ids))[:, start : start + length].abs().max()
            assert apart > 1e-3, "without the description a sequence sees those before it"
    packed.square().sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.ranks(2)
def test_a_layer_alone_has_the_length_of_the_whole_row(group):
    """With sequence parallelism its input is a part of the row."""
    parallel_state.initialize_model_parallel(2)
    hidden = torch.randn(sum(LENGTHS) + 3, 1, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    outputs = []
    for split in (False, True):
        config = TransformerConfig(
            num_layers=1,
            hidden_size=12,
            num_attention_heads=3,
            params_dtype=torch.float64,
            **NO_DROPOUT,
            tensor_model_parallel_size=2,
            sequence_parallel=split,
        )
        torch.manual_seed(3)
        layer = TransformerLayer(config, get_gpt_layer_local_spec().submodules)
        own = hidden.chunk(2)[group.rank()] if split else hidden
        outputs.append(layer(own, packed_seq_params=params())[0])
    assert_close_to(outputs[1], outputs[0].chunk(2)[group.rank()], rtol_of_norm=1e-13)


@pytest.mark.ranks(1)
def test_a_table_of_positions_is_read_where_the_program_says(group):
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, params_dtype=torch.float64)
    model = GPTModel(config, get_gpt_layer_local_spec(), V, S).eval()
    ids = torch.randint(V, (1, 9))
    places = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 0]])
    expected = model(ids, packed_seq_params=params())
    assert torch.equal(model(ids, places, packed_seq_params=params()), expected)
    assert not torch.equal(model(ids, places + 1, packed_seq_params=params()), expected)
    with pytest.raises(ConfigError, match="packed_seq_params and document_ids both say"):
        model(ids, packed_seq_params=params(), document_ids=places)
    with pytest.raises(ShardingError, match=r"one row, and input_ids have the shape \[2, 9\]"):
        model(ids.expand(2, -1), packed_seq_params=params())


def test_numbers_and_positions():
    documents, positions = params(cu_seqlens_q_padded=starts(PADDED)).documents_and_positions(torch.Size((1, 14)))
    assert documents.tolist() == [[0, 0, 0, -1, 1, 1, 1, 1, 1, 2, -3, -3, 3, 3]]
    assert positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2, 0, 1]]


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"qkv_format": "bshd"}, ConfigError, r"qkv_format 'bshd' and cu_seqlens_q given"),
        ({"cu_seqlens_q": None}, ConfigError, r"qkv_format 'thd' and cu_seqlens_q None"),
        ({"cu_seqlens_kv": starts((3, 4, 2))}, ConfigError, r"another cu_seqlens_kv than cu_seqlens_q"),
        ({"cu_seqlens_kv_padded": starts(PADDED)}, ConfigError, r"another cu_seqlens_kv_padded than"),
        ({"local_cp_size": 2}, ConfigError, r"lets ranks share a sequence"),
        ({"cu_seqlens_q": starts((3, 9))}, ShardingError, r"does not fit a row of 9 tokens"),
        ({"cu_seqlens_q": torch.tensor([1, 4])}, ShardingError, r"does not fit a row of 9 tokens"),
        ({"cu_seqlens_q": torch.tensor([0, 4, 3])}, ShardingError, r"does not fit a row of 9 tokens"),
        ({"cu_seqlens_q_padded": starts((3, 4, 2))}, ShardingError, r"does not fit a row of 9 tokens"),
        ({"cu_seqlens_q_padded": starts((9,))}, ShardingError, r"does not fit a row of 9 tokens"),
    ],
)
def test_what_describes_no_row_is_refused(fields, kind, message):
    with pytest.raises(kind, match=message):
        params(**fields).documents_and_positions(torch.Size((1, 9)))
