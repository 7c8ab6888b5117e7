"""Megatron's marks on parameters: programs set them, early or late, and find them on those of the door's layers."""

import pytest
import torch
from harness.parity import assert_bit_equal, assert_close_to
from torch import nn

from shardwise import parallel_state
from shardwise.core.errors import DesyncError, DivergenceError
from shardwise.core.sharding import Replicas, balanced_range
from shardwise.megatron.config import ModelParallelConfig, TransformerConfig
from shardwise.megatron.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from shardwise.megatron.layer_parts import MLP, SelfAttention
from shardwise.megatron.layer_specs import get_gpt_layer_local_spec
from shardwise.megatron.models.gpt import GPTModel
from shardwise.nn.replicated import replicas_of
from shardwise.tensor_parallel import RowParallelLinear
from shardwise.training.optimizer.grad_norm import global_grad_norm

# Tokens, hidden size, and rows of the split weight, which divide nothing.
S, H, ROWS = 7, 6, 5


class Program(nn.Module):
    """A norm of this rank's tokens, rows of a weight that is split, and an expert of its own; no layer of ours."""

    def __init__(self, ranks, num_ranks):
        super().__init__()
        torch.manual_seed(3)
        norm = nn.LayerNorm(H, dtype=torch.float64)
        rows = torch.randn(ROWS, H, dtype=torch.float64)
        experts = [nn.Linear(H, 3, dtype=torch.float64) for _ in range(num_ranks)]
        tokens, other = torch.randn(S, H, dtype=torch.float64), torch.randn(4, H, dtype=torch.float64)
        self.norm = norm
        own = [balanced_range(ROWS, num_ranks, rank) for rank in ranks]
        self.rows = nn.Parameter(torch.cat([rows[start:stop] for start, stop in own]))
        self.experts = nn.ModuleList(experts[rank] for rank in ranks)
        self.tokens = [tokens[slice(*balanced_range(S, num_ranks, rank))] for rank in ranks]
        self.other = other

    def forward(self):
        losses = [expert(self.norm(x)).square().sum() for expert, x in zip(self.experts, self.tokens, strict=True)]
        return sum(losses) + (self.other @ self.rows.T).square().sum()


def wrap(model, **options):
    config = TransformerConfig(num_layers=1, hidden_size=H, num_attention_heads=1)
    return DistributedDataParallel(config, DistributedDataParallelConfig(**options), model)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("missing", [None, "sequence_parallel", "tensor_model_parallel", "allreduce"])
def test_gradients_of_parameters_that_are_marked_late_are_those_of_the_dense_model(group, missing):
    parallel_state.initialize_model_parallel(2)
    me = group.rank()
    dense = Program([0, 1], 2)
    dense().backward()
    model = Program([me], 2)
    wrapped = wrap(model)
    if missing != "tensor_model_parallel":
        model.rows.tensor_model_parallel = True
    if missing != "allreduce":
        for param in model.experts.parameters():
            param.allreduce = False
    if missing in ("tensor_model_parallel", "allreduce"):
        name = "rows" if missing == "tensor_model_parallel" else "experts.0.bias"
        with pytest.raises(DesyncError, match=f"parameter '{name}'"):
            wrapped()
        return
    wrapped().backward()
    if missing is None:
        for param in model.norm.parameters():
            param.sequence_parallel = True
    finalize_model_grads([wrapped])
    assert_close_to(model.rows.grad, dense.rows.grad[slice(*balanced_range(ROWS, 2, me))], rtol_of_norm=1e-14)
    for param, expected in zip(model.experts[0].parameters(), dense.experts[me].parameters(), strict=True):
        assert_close_to(param.grad, expected.grad, rtol_of_norm=1e-14)
    for param, expected in zip(model.norm.parameters(), dense.norm.parameters(), strict=True):
        if missing is None:
            assert_close_to(param.grad, expected.grad, rtol_of_norm=1e-14)
        else:
            assert (param.grad - expected.grad).norm() > 0.1 * expected.grad.norm()


@pytest.mark.ranks(4)
def test_an_expert_of_the_program_s_own_is_averaged_over_its_copies(group):
    """With ``allreduce=False``, as a program marks it: ranks 0 and 2 hold one expert, and 1 and 3 the other."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    torch.manual_seed(group.rank() % 2)
    model = torch.nn.Linear(H, 1, bias=False, dtype=torch.float64)
    model.weight.allreduce = False
    wrapped = wrap(model, check_for_nan_in_grad=True)
    wrapped(torch.full((1, H), 1.0 + group.rank(), dtype=torch.float64)).sum().backward()
    finalize_model_grads([wrapped])
    # Sums of both copies, divided by all ranks, whose tokens they saw.
    mean = (2 + 4) / 4 if group.rank() % 2 else (1 + 3) / 4
    assert_bit_equal(model.weight.grad, torch.full((1, H), mean, dtype=torch.float64))
    torch.manual_seed(7)
    expected = torch.nn.Linear(H, 1, bias=False, dtype=torch.float64).weight
    if group.rank() < 2:
        model.weight.data.copy_(expected * (1 + group.rank()))
    wrapped.broadcast_params()
    assert_bit_equal(model.weight, expected * (1 + group.rank() % 2))
    model.weight.grad.fill_(torch.nan if group.rank() % 2 else 0.0)
    with pytest.raises(DivergenceError, match="a gradient is NaN or infinite"):
        finalize_model_grads([wrapped])


@pytest.mark.ranks(2)
def test_a_tied_weight_that_is_marked_late_has_the_gradient_of_the_dense_model(group):
    parallel_state.initialize_model_parallel(1, 2)
    stage = group.rank()
    torch.manual_seed(3)
    dense = nn.Linear(H, ROWS, bias=False, dtype=torch.float64)
    inputs = [torch.randn(S, H, dtype=torch.float64) for _ in range(2)]
    sum(dense(x).square().sum() for x in inputs).backward()
    model = nn.Linear(H, ROWS, bias=False, dtype=torch.float64)
    model.load_state_dict(dense.state_dict())
    wrapped = wrap(model)
    wrapped(inputs[stage]).square().sum().backward()
    model.weight.shared_embedding = True
    if stage == 1:
        model.weight.shared = True
    finalize_model_grads([wrapped])
    assert_close_to(model.weight.grad, dense.weight.grad, rtol_of_norm=1e-14)
    norm = global_grad_norm(
        model,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        pp_group=parallel_state.get_pipeline_model_parallel_group(),
    )
    assert_close_to(norm, dense.weight.grad.norm(), rtol_of_norm=1e-14)


@pytest.mark.ranks(2)
def test_a_mark_that_is_taken_back_late_counts(group):
    parallel_state.initialize_model_parallel(2)
    config = ModelParallelConfig(params_dtype=torch.float64, sequence_parallel=True, tensor_model_parallel_size=2)
    gradients = {}
    for is_marked in (True, False):
        layer = RowParallelLinear(
            H, 3, config=config, init_method=nn.init.ones_, bias=True, input_is_parallel=True, skip_bias_add=False
        )
        assert layer.bias.sequence_parallel
        wrapped = wrap(layer)
        wrapped(torch.ones(4, 1, H // 2, dtype=torch.float64))[0].sum().backward()
        layer.bias.sequence_parallel = is_marked
        finalize_model_grads([wrapped])
        gradients[is_marked] = layer.bias.grad
    assert_bit_equal(gradients[False], torch.full((3,), 2.0, dtype=torch.float64))
    assert_bit_equal(gradients[True], torch.full((3,), 4.0, dtype=torch.float64))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("split", [False, True], ids=["", "sp"])
def test_parameters_of_the_model_are_marked_as_their_replicas_are(group, split):
    parallel_state.initialize_model_parallel(2)
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, qk_layernorm=True, sequence_parallel=split
    )

    def marked(model):
        names = {id(param): name for name, param in model.named_parameters()}
        replicas = replicas_of(model)
        assert all(param.sequence_parallel == ("tp" in replicas[param].summed_over) for param in replicas)
        return {names[id(param)] for param in replicas if param.sequence_parallel}

    with torch.device("meta"):
        model = GPTModel(config, get_gpt_layer_local_spec(qk_layernorm=True), 23, 9)
    found = marked(model)
    norms = {name for name, _ in model.named_parameters() if "layernorm" in name}
    heads = {name for name in norms if "self_attention" in name}
    assert len(heads) == 4
    biases = {f"decoder.layers.0.{name}.bias" for name in ("self_attention.linear_proj", "mlp.linear_fc2")}
    assert found == (norms | biases if split else heads)
    # New parameters are marked too.
    model.to_empty(device="cpu")
    assert marked(model) == found
    model.reset_parameters()
    assert marked(model) == found
    # So are those of a part by itself.
    assert MLP(config).linear_fc2.bias.sequence_parallel == split
    assert marked(SelfAttention(config)) == {name.partition("self_attention.")[2] for name in found} - {""}
    # What a program marks is stated for the engine when a wrapper takes the model; the rest stays as it was.
    before = replicas_of(model)
    model.decoder.layers[0].mlp.linear_fc1.bias.sequence_parallel = True
    wrap(model)
    changed = {param: replicas for param, replicas in replicas_of(model).items() if replicas != before[param]}
    assert changed == {model.decoder.layers[0].mlp.linear_fc1.bias: Replicas(summed_over=("tp",))}
