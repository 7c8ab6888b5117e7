"""Ranks of GPUs have all of their model on the GPU, whatever PyTorch's default device is, and a step moves nothing."""

import pytest
import torch
import torch.nn.functional as F
from harness.model_options import NO_DROPOUT
from harness.on_pretended_gpu import StepRecorder, fake_tensors, join
from harness.parity import assert_bit_equal
from torch import nn

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.megatron.config import TransformerConfig
from shardwise.megatron.models.bert import BertModel
from shardwise.megatron.models.gpt import GPTModel
from shardwise.megatron.process_groups_config import ProcessGroupCollection
from shardwise.models.adapters.config import LoraConfig
from shardwise.models.adapters.lora_layers import LoraLinear
from shardwise.models.transformer.layer import TransformerLayerSpec
from shardwise.models.transformer.rotary import RotaryEmbedding

B, S, V = 2, 7, 101
KINDS = [*(pytest.param(kind, marks=pytest.mark.matrix) for kind in ("gpt2", "bloom")), "llama", "bert"]


class OwnNorm(nn.Module):
    """One that a user writes, who knows nothing of groups."""

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.weight)


def made(kind, group, **options):
    """A model of this kind, as one rank of the group has it."""
    llama = kind == "llama"
    config = TransformerConfig(
        num_layers=2,
        hidden_size=48,
        num_attention_heads=6,
        num_query_groups=2 if llama else 6,
        ffn_hidden_size=30,
        normalization="RMSNorm" if llama else "LayerNorm",
        gated_linear_unit=llama,
        activation_func=F.silu if llama else F.gelu,
        add_bias_linear=not llama,
        qk_layernorm=llama,
        **NO_DROPOUT,
        embedding_layernorm=kind in ("bloom", "bert"),
        norm_position="post" if kind == "bert" else "pre",
        final_layernorm=kind != "bert",
        tensor_model_parallel_size=group.size(),
        sequence_parallel=group.size() > 1,
        **options,
    )
    groups = ProcessGroupCollection(tp=group)
    if kind == "bert":
        return BertModel(config, 2, TransformerLayerSpec(), V, S, pg_collection=groups)
    positions = {"gpt2": "learned_absolute", "llama": "rope", "bloom": "alibi"}[kind]
    spec = TransformerLayerSpec(norm=OwnNorm) if kind == "gpt2" else TransformerLayerSpec()
    return GPTModel(config, spec, V, S, position_embedding_type=positions, pg_collection=groups)


def elsewhere(model, device="cuda:0"):
    """Every parameter, buffer and other tensor of the model that is not on the device."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for path, module in model.named_modules():
        tensors += [
            (f"{path}.{name}", value) for name, value in vars(module).items() if isinstance(value, torch.Tensor)
        ]
    assert len(tensors) > 10
    return {name: str(tensor.device) for name, tensor in tensors if str(tensor.device) != device}


def where_it_lies(kind):
    group = join(world_size=2, rank=1)
    with fake_tensors(), StepRecorder():
        model = made(kind, group)
        found = {"made": elsewhere(model)}
        found["drawn on the CPU"] = elsewhere(made(kind, group, use_cpu_initialization=True), "cpu")
        if kind == "llama":
            model = made(kind, group)
            LoraLinear.add(model.decoder.layers[1].mlp.linear_fc2, LoraConfig(r=3), {"down_proj": None})
            assert sum("lora_A" in name for name, _ in model.named_parameters()) == 1
            found["with an adapter"] = elsewhere(model)
    with torch.device("meta"):
        model = made(kind, group)

    def allocate(device):
        found["allocated to be reset"] = {} if str(device) == "cuda:0" else device
        # There is no memory to allocate.
        raise InterruptedError

    model.to_empty = allocate
    with pytest.raises(InterruptedError):
        model.reset_parameters()
    assert len(found) > 2
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_all_of_a_model_is_on_the_gpu(pretended_gpu, kind):
    assert {when: names for when, names in pretended_gpu(where_it_lies, kind).items() if names} == {}


def a_step(kind, device):
    group = join(f"{device}:fake", world_size=2, rank=1)
    with fake_tensors(), StepRecorder():
        model = made(kind, group)
        ids, mask = torch.ones(B, S, dtype=torch.int64, device=device), torch.ones(B, S, device=device)
        with CollectiveCounter() as forward, StepRecorder() as recorder:
            loss = model(ids, labels=ids) if kind != "bert" else model(ids, mask, lm_labels=ids)[0]
        with CollectiveCounter() as backward, recorder:
            loss.sum().backward()
    assert all(
        param.grad is not None for name, param in model.named_parameters() if name[:6] not in ("pooler", "binary")
    )
    return recorder, forward.launches, backward.launches


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_on_the_gpu_moves_nothing_there_and_is_counted_whole(pretended_gpu, kind):
    recorder, *launches = pretended_gpu(a_step, kind, "cuda")
    assert recorder.copies == {}
    assert recorder.operators["aten.mm.default"] + recorder.operators["aten.addmm.default"] > 10
    # The backward runs in autograd's thread of the GPU, and on a CPU in the one that called it.
    _, *on_the_cpu = pretended_gpu(a_step, kind, "cpu")
    assert launches == on_the_cpu
    assert {launch.name for launch in launches[1]} == {"all_gather", "reduce_scatter"}


def a_moved_table():
    with fake_tensors():
        rotary = RotaryEmbedding(8)
        return [str(rotary.to(device).inverse_frequencies.device) for device in ("cpu", "cuda", "meta", "cpu")]


def test_rotary_frequencies_move_with_their_module(pretended_gpu):
    assert pretended_gpu(a_moved_table) == ["cpu", "cuda:0", "cuda:0", "cpu"]


def test_rotary_frequencies_keep_their_values_and_are_not_saved():
    with torch.device("meta"):
        rotary = RotaryEmbedding(8)
    values = 10000.0 ** -(torch.arange(4).double() / 4)
    for change in (rotary.bfloat16, lambda: rotary.to("meta"), lambda: rotary.to_empty(device="cpu")):
        change()
        assert_bit_equal(rotary.inverse_frequencies, values)
    assert rotary.state_dict() == {}
