"""Calls of Megatron's models: the axes of what they return, and every argument that Megatron has."""

import inspect

import pytest
import torch
from harness.parity import assert_bit_equal, assert_close_to

from shardwise import parallel_state
from shardwise.core.communication.collectives import all_gather
from shardwise.core.errors import ConfigError, ShardingError
from shardwise.megatron.config import TransformerConfig
from shardwise.megatron.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from shardwise.megatron.layer_specs import get_gpt_layer_local_spec
from shardwise.megatron.models.bert import BertModel
from shardwise.megatron.models.gpt import GPTModel
from shardwise.models.bert import Bert
from shardwise.models.gpt import GPT
from shardwise.models.transformer.rotary import RotaryScaling
from shardwise.tensor_parallel import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region

# No two sizes are equal, so that no axis passes for another.
V, B, S, H = 23, 3, 7, 12


def config_of(**settings):
    sizes = {"num_layers": 2, "hidden_size": H, "num_attention_heads": 2}
    return TransformerConfig(**sizes, params_dtype=torch.float64, hidden_dropout=0.0, attention_dropout=0.0, **settings)


def gpt(config=None, **options):
    torch.manual_seed(3)
    return GPTModel(config or config_of(), get_gpt_layer_local_spec(), V, 8, **options)


def ids():
    return torch.randint(V, (B, S), generator=torch.Generator().manual_seed(1))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("parallel_output", [True, False])
@pytest.mark.parametrize("settings", [{}, {"use_inference_optimized_layers": True}], ids=["", "inference"])
def test_logits_are_batch_first(group, parallel_output, settings):
    parallel_state.initialize_model_parallel(2)
    model = gpt(config_of(**settings), parallel_output=parallel_output).eval()
    own = (12, 11)[group.rank()]
    with torch.no_grad():
        logits, of_engine = model(ids()), GPT.forward(model, ids())
    assert logits.shape == (B, S, own if parallel_output else V)
    assert logits.is_contiguous()
    assert_close_to(logits, of_engine.transpose(0, 1), rtol_of_norm=1e-12)
    assert model(ids(), labels=ids()).shape == (B, S)
    # A call may decide otherwise than the model.
    whole, part = (model(ids(), runtime_gather_output=gathers) for gathers in (True, False))
    assert (whole.shape, part.shape) == ((B, S, V), (B, S, own))
    assert_bit_equal(whole.split([12, 11], dim=-1)[group.rank()], part)
    assert_bit_equal(whole if not parallel_output else part, logits)


@pytest.mark.ranks(2)
def test_logits_of_a_last_stage_and_hidden_states_of_the_others(group):
    parallel_state.initialize_model_parallel(1, 2)
    first = group.rank() == 0
    model = gpt(config_of(pipeline_model_parallel_size=2), pre_process=first, post_process=not first)
    model.set_input_tensor(None if first else torch.ones(S, B, H, dtype=torch.float64))
    assert model(ids()).shape == ((S, B, H) if first else (B, S, V))


class Head(torch.nn.Linear):
    """A program's own output layer, the same on all ranks, as that of a model of values."""

    def forward(self, input_, weight=None, runtime_gather_output=None):
        assert weight is None
        output = super().forward(input_)
        if self.sequence_parallel:
            output = gather_from_sequence_parallel_region(output, tensor_parallel_output_grad=False)
        return output, None


@pytest.mark.ranks(2)
@pytest.mark.parametrize("splits", [False, True], ids=["", "sp"])
def test_a_head_of_the_program_s_own(group, splits):
    whole_ids = torch.randint(V, (B, 8), generator=torch.Generator().manual_seed(1))
    parallel_state.initialize_model_parallel(2)
    model = gpt(config_of(tensor_model_parallel_size=2, sequence_parallel=splits))
    with torch.no_grad():
        expected = model(whole_ids, runtime_gather_output=True)
    weight = all_gather(model.output_layer.weight.detach(), group=group, sizes=[12, 11])
    model.output_layer = Head(H, V, bias=False, dtype=torch.float64)
    model.output_layer.sequence_parallel = model.output_layer.weight.sequence_parallel = splits
    with torch.no_grad():
        model.output_layer.weight.copy_(weight)
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    for gathers in (None, True):
        found = wrapped(whole_ids, runtime_gather_output=gathers)
        assert_close_to(found, expected, rtol_of_norm=1e-12)
    found.square().sum().backward()
    finalize_model_grads([wrapped])
    hidden = torch.linalg.lstsq(weight, expected.flatten(0, 1).T).solution.T
    assert_close_to(model.output_layer.weight.main_grad, 2 * expected.flatten(0, 1).T @ hidden, rtol_of_norm=1e-8)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("add_binary_head", [True, False])
def test_logits_of_bert_are_batch_first(group, add_binary_head):
    parallel_state.initialize_model_parallel(2)
    torch.manual_seed(3)
    bert = BertModel(config_of(), 0, get_gpt_layer_local_spec(), V, 8, add_binary_head=add_binary_head)
    logits, choice = bert(ids(), None)
    of_engine, _ = Bert.forward(bert, ids(), None)
    assert_bit_equal(logits, of_engine.transpose(0, 1).contiguous())
    assert choice is None if not add_binary_head else choice.shape == (B, 2)
    assert bert(ids(), None, lm_labels=ids())[0].shape == (B, S)
    with pytest.raises(ConfigError, match="inference_context is given, which is not offered here: BERT reads whole"):
        bert(ids(), None, inference_context=object())
    with pytest.raises(ConfigError, match="return_embeddings is given"):
        BertModel(config_of(), 0, get_gpt_layer_local_spec(), V, 8, return_embeddings=True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("scatters", [True, False])
@pytest.mark.parametrize("splits", [False, True], ids=["", "sp"])
def test_the_decoder_reads_what_a_program_embeds(group, splits, scatters):
    parallel_state.initialize_model_parallel(2)
    options = {"scatter_embedding_sequence_parallel": scatters, "share_embeddings_and_output_weights": True}
    model = gpt(config_of(sequence_parallel=splits), **options)
    expected = gpt(config_of(sequence_parallel=splits), share_embeddings_and_output_weights=True)
    positions = torch.arange(S).expand(B, -1)
    hidden = model.embedding(ids(), positions)
    rows = (4, 3)[group.rank()] if splits else S
    assert hidden.shape == (rows if scatters else S, B, H)
    if splits and not scatters:
        hidden = scatter_to_sequence_parallel_region(hidden)
    # By position, as Megatron orders them: decoder_input comes before labels.
    loss = model(None, positions, None, hidden, ids())
    assert_close_to(loss, expected(ids(), positions, labels=ids()), rtol_of_norm=1e-12)
    loss.sum().backward()
    expected(ids(), positions, labels=ids()).sum().backward()
    for (name, param), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert_close_to(param.grad, other.grad, rtol_of_norm=1e-11, name=name)
    # Padding to the left, which the engine moves where it embeds the tokens itself.
    mask = torch.arange(S).expand(B, -1) >= torch.arange(B)[:, None]
    found, wanted = model(ids(), positions, mask, hidden.detach()), expected(ids(), positions, mask)
    assert_close_to(found[mask], wanted[mask], rtol_of_norm=1e-12)
    if splits and not scatters:
        with pytest.raises(ConfigError, match=r"scatter_embedding_sequence_parallel is False.*as decoder_input"):
            model(ids())


@pytest.mark.ranks(1)
def test_settings_of_rotary_positions(group):
    parallel_state.initialize_model_parallel()
    position = {"position_embedding_type": "rope"}
    for options, scaling in (
        ({"rope_scaling": False, "rope_scaling_factor": 3.0}, None),
        ({"rope_scaling": True}, RotaryScaling("llama3", 8.0, 8192)),
        ({"rope_scaling": True, "rope_scaling_factor": 3.0}, RotaryScaling("llama3", 3.0, 8192)),
        ({"seq_len_interpolation_factor": 2.0}, RotaryScaling("linear", 2.0)),
    ):
        assert gpt(**position, **options).rope_scaling == scaling
    halved, plain = gpt(**position, seq_len_interpolation_factor=2.0), gpt(**position)
    assert_close_to(halved(ids()), plain(ids(), torch.arange(S) / 2), rtol_of_norm=1e-12)
    with pytest.raises(ConfigError, match=r"rope_scaling is True and seq_len_interpolation_factor 2\.0"):
        gpt(**position, rope_scaling=True, seq_len_interpolation_factor=2.0)


@pytest.mark.ranks(1)
def test_arguments_at_their_defaults_change_nothing_and_others_are_refused_by_name(group):
    parallel_state.initialize_model_parallel()
    model = gpt()
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(GPTModel.forward).parameters.items()
        if name not in ("self", "input_ids")
    }
    assert_bit_equal(model(ids(), **defaults), model(ids()))
    for name, value in {"extra_block_kwargs": {"x": 1}, "padding_mask": torch.zeros(B, S, dtype=torch.bool)}.items():
        with pytest.raises(ConfigError, match=f"{name} is given, which is not offered here"):
            model(ids(), **{name: value})
    with pytest.raises(ConfigError, match="mtp_block_spec is given"):
        gpt(mtp_block_spec=get_gpt_layer_local_spec())
    with pytest.raises(ConfigError, match=r"decoder_input is torch.int64.*before labels, as in Megatron"):
        model(ids(), None, None, ids())
    with pytest.raises(ShardingError, match=r"hidden states of shape \[6, 3, 12\] .* takes \[7, batch, 12\]"):
        model(ids(), decoder_input=torch.zeros(6, B, H, dtype=torch.float64))
