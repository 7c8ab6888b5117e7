"""The linear with its communication: what it computes, what it sends, what it keeps, and when."""

import pytest
import torch
import torch.nn.functional as F
from harness.overlap import ArrivesAfter, ProductsDone
from harness.parity import assert_bit_equal, assert_close_to, assert_unmodified
from harness.watchdog import wait_until
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.communication.context import context_of
from shardwise.core.errors import ShardingError
from shardwise.core.sequence_view import SequenceView
from shardwise.core.sharding import ParamLayout
from shardwise.models.config import ModelConfig
from shardwise.models.transformer.attention import SelfAttention
from shardwise.nn import linear
from shardwise.nn.linear import LinearParallelism, tensor_parallel_linear
from shardwise.nn.recompute import is_checkpointing, is_recomputing, recomputed

COLUMN, COLUMN_SEQUENCE = LinearParallelism.COLUMN, LinearParallelism.COLUMN_SEQUENCE
ROW, ROW_SEQUENCE = LinearParallelism.ROW, LinearParallelism.ROW_SEQUENCE
MOVING = [COLUMN, COLUMN_SEQUENCE, ROW, ROW_SEQUENCE]
# Each way to compute, with the option that overlaps it.
WAYS = [*((each, {}) for each in MOVING), *((each, {"overlaps": True}) for each in (COLUMN_SEQUENCE, ROW_SEQUENCE))]


class Case:
    """A dense linear and this rank's part of it: weight, bias, input, output gradient."""

    def __init__(self, parallelism, group, rows, i, o, dtype=torch.float64):
        t, me = group.size(), group.rank()
        self.whole = {
            "input": torch.randn(*rows, i, dtype=torch.float64).to(dtype),
            "weight": torch.randn(o, i, dtype=torch.float64).to(dtype),
            "output": torch.randn(*rows, o, dtype=torch.float64).to(dtype),
        }
        if parallelism in (COLUMN, COLUMN_SEQUENCE):
            self.whole["bias"] = torch.randn(o, dtype=torch.float64).to(dtype)
        last = len(rows)
        split = {
            COLUMN: {"weight": 0, "bias": 0, "output": last},
            COLUMN_SEQUENCE: {"weight": 0, "bias": 0, "output": last, "input": 0},
            ROW: {"weight": 1, "input": last},
            ROW_SEQUENCE: {"weight": 1, "input": last, "output": 0},
        }[parallelism]
        self.layouts = {
            name: ParamLayout.split(whole.shape, split[name], t) if name in split else None
            for name, whole in self.whole.items()
        }
        self.rank, self.group, self.parallelism = me, group, parallelism
        self.own = {name: self.part(name, whole).requires_grad_(name != "output") for name, whole in self.whole.items()}

    def part(self, name, whole):
        layout = self.layouts[name]
        return whole.clone() if layout is None else layout.take(whole, self.rank).clone()

    def run(self, **options):
        return tensor_parallel_linear(
            self.own["input"],
            self.own["weight"],
            self.own.get("bias"),
            parallelism=self.parallelism,
            group=self.group,
            sequence=SequenceView(self.whole["input"].size(0), self.group),
            **options,
        )

    def dense(self, after=lambda output: output):
        """Output and gradients of the whole, by name."""
        leaves = {name: whole.double().requires_grad_() for name, whole in self.whole.items() if name != "output"}
        output = after(F.linear(leaves["input"], leaves["weight"], leaves.get("bias")))
        output.backward(self.whole["output"].double())
        return {"output": output.detach()} | {name: leaf.grad for name, leaf in leaves.items()}

    def assert_equals_dense(self, output, rtol=1e-12, **options):
        for name, expected in self.dense(**options).items():
            actual = output.detach() if name == "output" else self.own[name].grad
            assert actual.dtype == self.whole[name].dtype
            error = torch.linalg.vector_norm(actual.double() - self.part(name, expected))
            # Against the whole's norm: a rank may hold none of it.
            assert float(error) <= rtol * float(torch.linalg.vector_norm(expected)), name


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("parallelism", MOVING)
def test_equals_dense(group, parallelism):
    # Sizes that divide everything, nothing, and of which some of four ranks get none.
    for rows, i, o in [((12, 2), 8, 12), ((13, 2), 13, 7), ((13,), 7, 13), ((12, 2, 3), 3, 2), ((3, 1), 1, 1)]:
        case = Case(parallelism, group, rows, i, o)
        with assert_unmodified(*case.own.values()):
            output = case.run()
            output.backward(case.own["output"])
        case.assert_equals_dense(output)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("parallelism", MOVING)
@pytest.mark.parametrize("way", ["plain", "overlapped", "fixed parts"])
def test_the_output_may_be_written_to(group, monkeypatch, parallelism, way):
    if way == "fixed parts":
        monkeypatch.setattr(context_of(group), "transports", ("trees",))
    for rows, i, o in [((12, 2), 8, 12), ((13,), 7, 13), ((12, 1, 3), 3, 2)]:
        case = Case(parallelism, group, rows, i, o)
        with assert_unmodified(*case.own.values()):
            output = case.run(overlaps=way == "overlapped")
            output += 1
            output.relu_().backward(case.own["output"])
        case.assert_equals_dense(output, after=lambda output: (output + 1).relu())


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("num_groups", [6, 1])
def test_the_projection_of_queries_keys_and_values_equals_dense(group, sequence_parallel, num_groups):
    """As attention makes it: of a key and a value several ranks hold copies, and the input's gradient is whole."""
    sizes = {"num_attention_heads": 6, "num_query_groups": num_groups, "hidden_size": 12, "num_layers": 1}
    sequence_parallel &= group.size() > 1
    config = ModelConfig(**sizes, sequence_parallel=sequence_parallel, add_qkv_bias=True, params_dtype=torch.float64)
    layer = SelfAttention(config, 1, group).linear_qkv
    layout, t, me = layer.param_layouts["weight"], group.size(), group.rank()
    whole = {name: torch.randn(param.global_shape).double() for name, param in layer.param_layouts.items()}
    for name, param in layer.named_parameters():
        param.data.copy_(layer.param_layouts[name].take(whole[name], me))
    x = torch.randn(6, 2, 12, dtype=torch.float64)
    rows = [torch.cat([torch.arange(*run) for run in runs]) for runs in layout.intervals]
    incoming = [torch.randn(6, 2, len(of_rank), dtype=torch.float64) for of_rank in rows]
    # A row that several ranks hold has the sum of their gradients.
    gradient = torch.zeros(6, 2, layout.global_shape[0], dtype=torch.float64)
    for of_rank, part in zip(rows, incoming, strict=True):
        gradient.index_add_(2, of_rank, part)

    own = (x.chunk(t)[me] if sequence_parallel else x).clone().requires_grad_()
    output = layer(own)
    output.backward(incoming[me])
    assert_close_to(output.detach(), F.linear(x, whole["weight"], whole["bias"])[..., rows[me]], rtol_of_norm=1e-13)
    expected = gradient @ whole["weight"]
    assert_close_to(own.grad, expected.chunk(t)[me] if sequence_parallel else expected, rtol_of_norm=1e-13)
    assert_close_to(layer.weight.grad, incoming[me].flatten(0, 1).t() @ x.flatten(0, 1), rtol_of_norm=1e-13)
    assert_close_to(layer.bias.grad, incoming[me].sum((0, 1)), rtol_of_norm=1e-13)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("parallelism", MOVING)
def test_awkward_strides(group, parallelism):
    case = Case(parallelism, group, (12, 2), 6, 9)
    for name in ("input", "output"):
        leaf = case.own[name].detach().transpose(0, 2).contiguous().transpose(0, 2)
        case.own[name] = leaf.requires_grad_(name == "input")
    with assert_unmodified(*case.own.values()):
        output = case.run()
        output.backward(case.own["output"])
    case.assert_equals_dense(output)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("parallelism", "options"), WAYS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "rtol"),
    # One rounding of each factor's product, one of each rank's partial sum, one of their sum.
    [(torch.float32, 1e-6), (torch.bfloat16, 3 * 2**-8), (torch.float16, 3 * 2**-11)],
    ids=["fp32", "bf16", "fp16"],
)
def test_lower_precisions(group, parallelism, options, dtype, rtol):
    case = Case(parallelism, group, (13, 2), 13, 7, dtype)
    output = case.run(**options)
    output.backward(case.own["output"])
    case.assert_equals_dense(output, rtol)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("parallelism", MOVING)
def test_without_gradients(group, parallelism):
    case = Case(parallelism, group, (12, 2), 13, 7)
    expected = case.run()
    for context in (torch.no_grad(), torch.inference_mode()):
        with assert_unmodified(*case.own.values()), context:
            output = case.run()
        assert not output.requires_grad
        assert_bit_equal(output.clone(), expected.detach())


@pytest.mark.ranks(2)
def test_local_communicates_nothing(group):
    x, weight, bias = (torch.randn(*shape, dtype=torch.float64) for shape in ((5, 2, 3), (4, 3), (4,)))
    leaves, dense = ([tensor.clone().requires_grad_() for tensor in (x, weight, bias)] for _ in range(2))
    incoming = torch.randn(5, 2, 4, dtype=torch.float64)
    with CollectiveCounter() as counter:
        output = tensor_parallel_linear(*leaves, parallelism=LinearParallelism.LOCAL, group=None)
        output.backward(incoming)
    assert counter.launches == []
    expected = F.linear(*dense)
    expected.backward(incoming)
    assert_bit_equal(output.detach(), expected.detach())
    for leaf, other in zip(leaves, dense, strict=True):
        assert_bit_equal(leaf.grad, other.grad)


@pytest.mark.ranks(4)
def test_a_shard_that_does_not_fit_the_sequence_is_told(group):
    weight = torch.randn(4, 3)
    options = {"parallelism": COLUMN_SEQUENCE, "group": group}
    with pytest.raises(ShardingError, match=r"rank . of 4 has 4 positions of a sequence of 12; it should have 3"):
        tensor_parallel_linear(torch.randn(4, 2, 3), weight, None, sequence=SequenceView(12, group), **options)
    # Balanced: 4, 3, 3, 3.
    with pytest.raises(ShardingError, match=r"sizes \[4, 3, 3, 3\] do not fit a shard of 5"):
        tensor_parallel_linear(torch.randn(5, 2, 3), weight, None, sequence=SequenceView(13, group), **options)


FLOATS = {COLUMN: 12 * 2 * 6, COLUMN_SEQUENCE: 6 * 2 * 6, ROW: 12 * 2 * 9, ROW_SEQUENCE: 12 * 2 * 9}
# gloo's reduce-scatter is an all-to-all here; see collectives.py.
TABLE = {
    # Forward, backward, backward with a frozen weight, backward without a gradient of the input.
    COLUMN: ([], ["all_reduce"], ["all_reduce"], []),
    COLUMN_SEQUENCE: (["all_gather"], ["all_gather", "reduce_scatter"], ["reduce_scatter"], ["all_gather"]),
    ROW: (["all_reduce"], [], [], []),
    ROW_SEQUENCE: (["reduce_scatter"], ["all_gather"], ["all_gather"], ["all_gather"]),
}


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("parallelism", MOVING)
@pytest.mark.parametrize("grads", ["all", "frozen weight", "no input gradient"])
def test_communication_is_that_of_the_table(group, parallelism, grads):
    case = Case(parallelism, group, (12, 2), 6, 9)
    case.own["weight"].requires_grad_(grads != "frozen weight")
    case.own["input"].requires_grad_(grads != "no input gradient")
    with CollectiveCounter() as forward:
        output = case.run()
    with CollectiveCounter() as backward:
        if output.requires_grad:
            output.backward(case.own["output"])
    names, all_grads, frozen, no_input = TABLE[parallelism]
    expected = {"all": all_grads, "frozen weight": frozen, "no input gradient": no_input}[grads]
    if group.size() == 1:
        names = expected = []
    assert [launch.name for launch in forward.launches] == names
    assert sorted(launch.name for launch in backward.launches) == expected
    with CollectiveCounter() as counter, torch.no_grad():
        case.run()
    assert [launch.name for launch in counter.launches] == names
    # What travels is an activation once, in its own dtype.
    for launch in forward.launches:
        assert launch.num_bytes == 8 * FLOATS[parallelism]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("parallelism", MOVING)
def test_what_is_kept_for_the_backward(group, parallelism):
    def kept(case):
        result = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: result.append(x) or x, lambda x: x):
            output = case.run()
        return output, {tensor.data_ptr() for tensor in result}

    case = Case(parallelism, group, (12, 2), 6, 9)
    own_input, weight = case.own["input"], case.own["weight"]
    _, pointers = kept(case)
    # With sequence parallelism too, only this rank's part of the input.
    assert pointers == {own_input.data_ptr(), weight.data_ptr()}
    weight.requires_grad_(False)
    output, pointers = kept(case)
    assert pointers == {weight.data_ptr()}
    output.backward(case.own["output"])
    assert weight.grad is None
    assert own_input.grad is not None
    if "bias" in case.own:
        assert_close_to(case.own["bias"].grad, case.part("bias", case.dense()["bias"]), rtol_of_norm=1e-12)


class Products(TorchDispatchMode):
    """Notes each matrix product among other events, once it is computed."""

    def __init__(self, note):
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func._schema.name == "aten::mm":
            self.note("mm")
        return result


class Noted:
    """A collective in flight that notes when it is waited for."""

    def __init__(self, pending, note):
        self.pending, self.note = pending, note

    def wait(self):
        self.note("wait")
        return self.pending.wait()


@pytest.mark.ranks(2, timeout=20)
@pytest.mark.parametrize(
    ("parallelism", "order"),
    [
        (COLUMN, ["mm", "all_reduce_async", "mm", "wait"]),
        (COLUMN_SEQUENCE, ["all_gather_async", "mm", "reduce_scatter_async", "wait", "mm", "wait"]),
    ],
    ids=str,
)
def test_the_weight_gradient_is_computed_while_the_input_gradient_travels(
    group, monkeypatch, tmp_path, parallelism, order
):
    case = Case(parallelism, group, (12, 2), 6, 9)
    output = case.run()
    seen, computed = [], tmp_path / "rank 0 has computed both products"

    def note(event):
        seen.append(event)
        if group.rank() == 0 and seen.count("mm") == 2:
            computed.touch()

    def noting(name, launch):
        def launch_late(*args, **kwargs):
            note(name)
            # Rank 1 joins the reduction only when rank 0 has computed the weight's gradient: so rank 0 cannot have
            # waited for it before.
            if group.rank() == 1 and name != "all_gather_async":
                wait_until(computed.exists, computed.name)
            return Noted(launch(*args, **kwargs), note)

        return launch_late

    for name in ("all_reduce_async", "all_gather_async", "reduce_scatter_async"):
        monkeypatch.setattr(linear, name, noting(name, getattr(linear, name)))
    with Products(note):
        output.backward(case.own["output"])
    # The second product is the weight's gradient, and nothing waits for the input's before it.
    assert seen == order
    case.assert_equals_dense(output)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("parallelism", [COLUMN, COLUMN_SEQUENCE], ids=str)
def test_the_input_gradient_may_arrive_as_late_as_the_weight_gradient(group, monkeypatch, parallelism):
    """Whoever waits for the first before computing the second waits in vain."""
    case = Case(parallelism, group, (12, 2), 6, 9)
    output = case.run()
    product, delayed = ProductsDone(2), []
    name = "all_reduce_async" if parallelism is COLUMN else "reduce_scatter_async"
    launch = getattr(linear, name)

    def delayed_launch(*args, **kwargs):
        delayed.append(ArrivesAfter(launch(*args, **kwargs), product))
        return delayed[0]

    monkeypatch.setattr(linear, name, delayed_launch)
    with product:
        output.backward(case.own["output"])
    assert len(delayed) == 1
    assert delayed[0].arrived_early
    case.assert_equals_dense(output)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("parallelism", MOVING)
@pytest.mark.parametrize("s", [12, 13])
def test_recomputation_adds_no_collective(group, parallelism, s):
    launches = []
    for recompute in (False, True):
        case = Case(parallelism, group, (s, 2), 6, 9)
        phases = []

        def run(*_, case=case, phases=phases):
            phases.append((is_checkpointing(), is_recomputing()))
            return case.run()

        with CollectiveCounter() as counter:
            output = recomputed(run, case.own["input"]) if recompute else run()
            output.backward(case.own["output"])
        launches.append(sorted(launch.name for launch in counter.launches))
        case.assert_equals_dense(output)
        assert phases == ([(True, False), (False, True)] if recompute else [(False, False)])
    assert launches[0] == launches[1]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("parallelism", "options"), WAYS, ids=str)
def test_autocast(group, parallelism, options):
    """As PyTorch's linear: computed in bf16, gradients of the parameters in their own dtype."""
    case = Case(parallelism, group, (13, 2), 13, 7, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = case.run(**options)
        with torch.no_grad():
            assert case.run(**options).dtype == torch.bfloat16
    assert output.dtype == torch.bfloat16
    output.backward(case.own["output"].bfloat16())
    case.assert_equals_dense(output.float(), rtol=4 * 2**-8)
    wide = Case(parallelism, group, (13, 2), 13, 7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = wide.run(**options)
    output.backward(wide.own["output"])
    wide.assert_equals_dense(output)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("parallelism", MOVING)
def test_a_second_derivative_is_refused(group, parallelism):
    case = Case(parallelism, group, (4, 2), 4, 4)
    gradients = torch.autograd.grad((case.run() ** 2).sum(), case.own["input"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradients[0].sum().backward()
