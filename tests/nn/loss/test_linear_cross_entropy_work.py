"""Output layer and loss in one: what it sends and when, what it keeps, and that it compiles."""

import pytest
import torch
import torch.distributed as dist
from harness.live_bytes import Peak
from harness.overlap import ArrivesAfter, ArrivesLater, ProductsDone, ProductTime
from harness.parity import assert_close_to
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.communication.collectives import all_reduce_async
from shardwise.core.sharding import balanced_range
from shardwise.kernels import loss_reference
from shardwise.nn.loss import linear_cross_entropy, linear_head
from shardwise.nn.loss.linear_cross_entropy import vocab_parallel_linear_cross_entropy

PLANS = ["local_logits", "chunked"]
TOKENS, WIDTH, VOCABULARY = 24, 7, 1030


def tensors(group, dtype=torch.float64, sequence_parallel=False, tokens=TOKENS, width=WIDTH, vocabulary=VOCABULARY):
    """Hidden states and weight of this rank, and all targets."""
    start, stop = balanced_range(vocabulary, group.size(), group.rank())
    target = torch.randint(vocabulary, (tokens,))
    hidden, weight = torch.randn(tokens, width).to(dtype), torch.randn(vocabulary, width)[start:stop].to(dtype)
    if sequence_parallel:
        start, stop = balanced_range(tokens, group.size(), group.rank())
        hidden = hidden[start:stop].clone()
    return hidden.requires_grad_(), weight.clone().requires_grad_(), target


def run(group, hidden, weight, target, **options):
    options = {"vocab_size": VOCABULARY, "memory_budget": 1} | options
    return vocab_parallel_linear_cross_entropy(hidden, weight, target, group=group, **options)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize(("dtype", "word"), [(torch.bfloat16, 4), (torch.float64, 8)], ids=["bf16", "fp64"])
@pytest.mark.parametrize(("smoothing", "numbers"), [(0.0, 3), (0.1, 4)])
def test_what_is_sent(group, plan, sequence_parallel, dtype, word, smoothing, numbers):
    for frozen in ((), ("hidden",), ("weight",)):
        hidden, weight, target = tensors(group, dtype, sequence_parallel)
        hidden.requires_grad_("hidden" not in frozen)
        weight.requires_grad_("weight" not in frozen)
        with CollectiveCounter() as forward:
            loss = run(
                group, hidden, weight, target, plan=plan, sequence_parallel=sequence_parallel, label_smoothing=smoothing
            )
        with CollectiveCounter() as backward:
            loss.sum().backward()
        sent = [(launch.name, launch.num_bytes) for launch in forward.launches]
        returned = [(launch.name, launch.num_bytes) for launch in backward.launches]
        if group.size() == 1:
            assert sent == returned == []
            continue
        moved = [("all_gather", hidden.numel() * dtype.itemsize)] if sequence_parallel else []
        # One exchange of the loss' own, of 12 bytes for each token.
        assert sent == [*moved, ("all_gather", TOKENS * numbers * word)]
        reduction = "reduce_scatter" if sequence_parallel else "all_reduce"
        assert returned == ([] if frozen == ("hidden",) else [(reduction, TOKENS * WIDTH * dtype.itemsize)])


class Events(TorchDispatchMode):
    """Notes matrix products among other events."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            self.seen.append("product")
        return func(*args, **(kwargs or {}))


class Noted:
    """A collective in flight that notes when it is waited for."""

    def __init__(self, pending, seen):
        self.pending, self.seen = pending, seen

    def wait(self):
        self.seen.append("wait")
        return self.pending.wait()


FORWARD = {
    "local_logits": ["product", "all_gather_async", "product", "wait"],
    # Three slices: each its logits and its share of the hidden gradient.
    "chunked": ["product"] * 5 + ["all_gather_async", "product", "wait"],
}
BACKWARD = {"local_logits": 1, "chunked": 6}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=["fp64", "fp16"])
def test_collectives_are_in_flight_during_products(group, monkeypatch, plan, sequence_parallel, dtype):
    seen = []

    def noting(name, launch):
        def launch_noted(*args, **kwargs):
            seen.append(name)
            return Noted(launch(*args, **kwargs), seen)

        return launch_noted

    for name in ("all_gather_async", "all_reduce_async", "reduce_scatter_async"):
        monkeypatch.setattr(linear_head, name, noting(name, getattr(linear_head, name)))
    hidden, weight, target = tensors(group, dtype, sequence_parallel)
    with Events(seen):
        loss = run(group, hidden, weight, target, plan=plan, sequence_parallel=sequence_parallel)
        forward = list(seen)
        seen.clear()
        loss.sum().backward()
    expected = FORWARD[plan]
    if dtype == torch.float16 and plan == "local_logits":
        expected = ["product", "all_gather_async", "wait", "product"]
    assert forward == expected
    reduction = "reduce_scatter_async" if sequence_parallel else "all_reduce_async"
    assert seen == [reduction, *["product"] * BACKWARD[plan], "wait"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("plan", "products"), [("local_logits", 2), ("chunked", 6)])
def test_the_statistics_may_arrive_as_late_as_the_hidden_gradient(group, monkeypatch, plan, products):
    """A delay of the exchange that is shorter than a product costs nothing: who waited before it would wait in vain."""
    hidden, weight, target = tensors(group)
    expected = run(group, hidden, weight, target, plan=plan)
    product, delayed = ProductsDone(products), []
    launch = linear_head.all_gather_async

    def delayed_launch(*args, **kwargs):
        delayed.append(ArrivesAfter(launch(*args, **kwargs), product))
        return delayed[0]

    monkeypatch.setattr(linear_head, "all_gather_async", delayed_launch)
    with product:
        loss = run(group, hidden, weight, target, plan=plan)
    assert len(delayed) == 1
    assert delayed[0].arrived_early
    assert_close_to(loss.detach(), expected.detach(), rtol_of_norm=1e-14)


def three_all_reduces(all_reduce_async, group, hidden, weight, target):
    """The loss with a sum or a maximum over the ranks wherever one is needed; gradients as autograd has them."""
    start, _ = balanced_range(weight.size(0) * group.size(), group.size(), group.rank())
    logits = hidden @ weight.t()
    maximum = all_reduce_async(logits.detach().amax(1), group=group, op=dist.ReduceOp.MAX).wait()
    column = (target - start).clamp(0, weight.size(0) - 1)
    owned = (target >= start) & (target < start + weight.size(0))
    picked = (logits.gather(1, column.unsqueeze(1)).squeeze(1) - maximum) * owned
    sums = (logits - maximum.unsqueeze(1)).exp().sum(1)
    whole_sums = all_reduce_async(sums.detach(), group=group).wait()
    whole_picked = all_reduce_async(picked.detach(), group=group).wait()
    return whole_sums.log() - whole_picked


@pytest.mark.ranks(2)
def test_a_delay_of_every_collective_is_hidden(group, monkeypatch):
    """Results arrive half a product after their launch: we never wait for one, three all-reduces thrice."""
    vocabulary = 4096 * group.size()
    hidden, weight, target = tensors(group, vocabulary=vocabulary)
    # The smallest product that a collective has to hide behind: one of two slices.
    slices = weight.numel() // weight.size(1) // 2 * hidden.size(0) * weight.element_size()
    delay = 0.5 * hidden.numel() * (weight.size(0) // 2)
    waited, clock = [], ProductTime()

    def later(launch):
        return lambda *args, **kwargs: ArrivesLater(launch(*args, **kwargs), clock, delay, waited)

    for name in ("all_gather_async", "all_reduce_async"):
        monkeypatch.setattr(linear_head, name, later(getattr(linear_head, name)))
    for plan, budget in (("local_logits", 1 << 40), ("chunked", slices)):
        with clock:
            loss = vocab_parallel_linear_cross_entropy(
                hidden,
                weight,
                target,
                group=group,
                vocab_size=vocabulary,
                plan=plan,
                memory_budget=budget,
                reduction="sum",
            )
            loss.backward()
        assert waited == [0, 0], plan
        waited.clear()
    with clock:
        losses = three_all_reduces(later(all_reduce_async), group, hidden, weight, target)
    assert_close_to(losses.sum().detach(), loss.detach(), rtol_of_norm=1e-13)
    assert waited == [delay] * 3


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_memory(group, monkeypatch, dtype, smoothing):
    # Temporaries of the reference kernels, which have no bearing on the plan, are made small.
    monkeypatch.setattr(loss_reference, "BLOCK_ELEMENTS", 1 << 13)
    tokens, width, columns = 256, 32, 8192
    word = dtype.itemsize
    slice_of_logits = 1024 * tokens * word
    monkeypatch.setitem(linear_cross_entropy._SLICE_BYTES, "cpu", slice_of_logits)
    # Of one activation, of all logits, and of the two gradients.
    activation, logits = tokens * width * word, tokens * columns * word
    gradients = activation + columns * width * word
    # Numbers per token, and the kernels' temporaries.
    small = 128 * tokens + 256 * 1024
    peaks, kept, forward_peaks = {}, {}, {}
    for plan in PLANS:
        hidden, weight, target = tensors(group, dtype, tokens=tokens, width=width, vocabulary=columns)
        with Peak(hidden, weight, target) as peak:
            options = {"vocab_size": columns, "reduction": "mean", "label_smoothing": smoothing}
            loss = vocab_parallel_linear_cross_entropy(hidden, weight, target, group=group, plan=plan, **options)
            kept[plan], forward_peaks[plan] = peak.count(), peak.peak
            loss.backward()
        peaks[plan] = peak.peak
    assert kept["chunked"] <= activation + small
    assert kept["local_logits"] <= logits + activation + small
    # The hidden gradient's sum in fp32, the gradient, and one slice of logits.
    assert forward_peaks["chunked"] <= 4 * tokens * width + activation + slice_of_logits + small
    # The hidden gradient as it is kept, and one slice of logits.
    assert gradients + slice_of_logits < peaks["chunked"] <= gradients + activation + slice_of_logits + small
    # The hidden gradient as it is kept, and the hidden states times a number for each token.
    assert logits + gradients < peaks["local_logits"] <= logits + gradients + 2 * activation + small


@pytest.mark.ranks(2)
@pytest.mark.parametrize("plan", PLANS)
def test_without_a_weight_gradient_nothing_is_kept_but_the_hidden_gradient(group, plan):
    hidden, weight, target = tensors(group, torch.bfloat16, tokens=256)
    weight.requires_grad_(False)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        loss = run(group, hidden, weight, target, plan=plan)
    large = [tensor.shape for tensor in kept if tensor.numel() > 4 * 256]
    assert large == [hidden.shape]
    seen = []
    with Events(seen):
        loss.sum().backward()
    assert seen == []


# Dynamo itself does what this warning of PyTorch's warns of.
@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("plan", ["local_logits", "chunked"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_one_graph(group, plan, sequence_parallel):
    # Two slices on each rank: the compiler takes its time over each.
    hidden, weight, target = tensors(group, sequence_parallel=sequence_parallel, vocabulary=770)
    options = {"plan": plan, "sequence_parallel": sequence_parallel, "label_smoothing": 0.1, "softcap": None}
    options["vocab_size"] = 770

    def results(function):
        loss = function(hidden, weight)
        return [loss.detach(), *torch.autograd.grad((loss * torch.linspace(0.5, 1.5, TOKENS)).sum(), [hidden, weight])]

    def loss_of(hidden, weight):
        return run(group, hidden, weight, target, **options)

    launched = []

    def compiler(graph, inputs):
        names = [str(node.target) for node in graph.graph.nodes if "_c10d_functional." in str(node.target)]
        launched.extend(name.split(".")[1] for name in names if "wait_tensor" not in name)
        return make_boxed_func(graph.forward)

    compiled = torch.compile(loss_of, fullgraph=True, backend=aot_autograd(fw_compiler=compiler))
    for ours, theirs in zip(results(compiled), results(loss_of), strict=True):
        assert_close_to(ours, theirs, rtol_of_norm=1e-13)
    gathers = ["all_gather_into_tensor"] * (1 + sequence_parallel)
    assert launched == [*gathers, "all_to_all_single" if sequence_parallel else "all_reduce"]
