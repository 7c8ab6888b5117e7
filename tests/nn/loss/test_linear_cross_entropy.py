"""Output layer and loss in one against the dense formula, written out in fp64."""

import pytest
import torch
import torch.nn.functional as F
from harness.parity import assert_bit_equal, assert_unmodified

from shardwise.core.errors import ConfigError, DivergenceError, ShardingError, VocabularyError
from shardwise.core.sharding import balanced_range
from shardwise.nn.loss.linear_cross_entropy import vocab_parallel_linear_cross_entropy
from shardwise.nn.recompute import recomputed

PLANS = ["local_logits", "chunked"]


def dense_loss(hidden, weight, bias, target, smoothing=0.0, z_loss=0.0, softcap=None, temperature=1.0):
    """Loss of each token, in the dtype of its arguments; -100 is ignored."""
    y = F.linear(hidden, weight, bias)
    if softcap is not None:
        y = softcap * torch.tanh(y / softcap)
    y = y / temperature
    normalizer = torch.logsumexp(y, -1)
    nll = normalizer.unsqueeze(-1) - y
    of_target = nll.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    loss = (1 - smoothing) * of_target
    if smoothing:
        loss = loss + smoothing / (y.size(-1) - 1) * (nll.sum(-1) - of_target)
    return (loss + z_loss * normalizer.square()).masked_fill(target == -100, 0.0)


class Case:
    """A dense output layer with its loss, and this rank's part of it."""

    def __init__(self, group, rows=(7, 3), width=11, vocab_size=101, dtype=torch.float64, bias=True, padded=None):
        self.group, self.rows, self.vocab_size, self.padded = group, rows, vocab_size, padded
        self.whole = {
            "hidden": torch.randn(*rows, width, dtype=torch.float64).to(dtype),
            "weight": torch.randn(vocab_size, width, dtype=torch.float64).div(width**0.5).to(dtype),
        }
        if bias:
            self.whole["bias"] = torch.randn(vocab_size, dtype=torch.float64).to(dtype)
        self.target = torch.randint(vocab_size, rows)
        self.incoming = torch.rand(rows, dtype=torch.float64) - 0.2

    def part(self, name, whole, sequence_parallel):
        """This rank's part of a parameter or activation, or of the gradient of one."""
        if name == "hidden":
            n = whole.size(0)
            start, stop = balanced_range(n, self.group.size(), self.group.rank()) if sequence_parallel else (0, n)
            return whole[start:stop]
        split = self.padded or self.vocab_size
        if split > self.vocab_size:
            whole = torch.cat([whole, whole.new_full((split - self.vocab_size, *whole.shape[1:]), self.filler)])
        start, stop = balanced_range(split, self.group.size(), self.group.rank())
        return whole[start:stop]

    filler = torch.nan

    def own(self, sequence_parallel=False, frozen=()):
        return {
            name: self.part(name, whole, sequence_parallel).clone().requires_grad_(name not in frozen)
            for name, whole in self.whole.items()
        }

    def run(self, own, sequence_parallel=False, **options):
        options["label_smoothing"] = options.pop("smoothing", 0.0)
        return vocab_parallel_linear_cross_entropy(
            own["hidden"],
            own["weight"],
            self.target,
            bias=own.get("bias"),
            group=self.group,
            vocab_size=self.vocab_size,
            padded_vocab_size=self.padded,
            sequence_parallel=sequence_parallel,
            **options,
        )

    def dense(self, **options):
        """Loss and gradients of the whole, by name."""
        leaves = {name: whole.to(torch.float64, copy=True).requires_grad_() for name, whole in self.whole.items()}
        loss = dense_loss(leaves["hidden"], leaves["weight"], leaves.get("bias"), self.target, **options)
        (loss * self.incoming).sum().backward()
        return {"loss": loss.detach()} | {name: leaf.grad for name, leaf in leaves.items()}

    def assert_equal(self, loss, own, expected, rtol, sequence_parallel=False, loss_rtol=None):
        error = torch.linalg.vector_norm(loss.detach().double() - expected["loss"])
        assert float(error) <= (loss_rtol or rtol) * float(torch.linalg.vector_norm(expected["loss"])) + 1e-300, "loss"
        self.filler = 0.0
        for name, tensor in own.items():
            if not tensor.requires_grad:
                assert tensor.grad is None
                continue
            assert tensor.grad.dtype == tensor.dtype
            part = self.part(name, expected[name], sequence_parallel)
            error = torch.linalg.vector_norm(tensor.grad.double() - part)
            # Against the whole's norm: a rank may hold none of it.
            bound = rtol * float(torch.linalg.vector_norm(expected[name])) + 1e-300
            assert float(error) <= bound, (name, float(error) / bound)

    def check(self, rtol=1e-12, sequence_parallel=False, frozen=(), plan="local_logits", loss_rtol=None, **options):
        # A budget that leaves the narrowest slices.
        own = self.own(sequence_parallel, frozen)
        with assert_unmodified(target=self.target, **own):
            loss = self.run(own, sequence_parallel, plan=plan, memory_budget=1, **options)
            incoming = self.incoming.to(loss.dtype)
            with assert_unmodified(incoming=incoming):
                if loss.requires_grad:
                    loss.backward(incoming)
        wide = torch.float64 if self.whole["weight"].dtype == torch.float64 else torch.float32
        assert loss.dtype == wide
        self.assert_equal(loss, own, self.dense(**options), rtol, sequence_parallel, loss_rtol)
        return loss.detach(), own


OPTIONS = {
    "plain": {},
    "smoothing": {"smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "cap": {"softcap": 3.0},
    "temperature": {"temperature": 0.7},
    "smoothing and cap": {"smoothing": 0.1, "softcap": 3.0},
    "all": {"smoothing": 0.2, "softcap": 5.0, "z_loss": 1e-3, "temperature": 1.3},
    "all but cap": {"smoothing": 0.2, "z_loss": 1e-3, "temperature": 1.3},
}


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_fp64_equals_dense(group, plan, options):
    # Uneven, even, in several slices, and with ranks that hold nothing.
    for vocab_size in (101, 64, 1100, 3, 2):
        case = Case(group, vocab_size=vocab_size)
        case.target[0, 0] = -100
        case.check(plan=plan, **options)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("plan", PLANS)
def test_sequence_parallel(group, plan):
    # Even, uneven, and with ranks that hold no token.
    for rows in ((12, 3), (13, 3), (2, 5), (9,)):
        case = Case(group, rows, vocab_size=37)
        case.target.view(-1)[2] = -100
        case.check(plan=plan, sequence_parallel=True)
        case = Case(group, rows, vocab_size=37, bias=False)
        case.check(plan=plan, sequence_parallel=True, smoothing=0.1)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    "frozen", [["weight"], ["weight", "bias"], ["bias"], ["hidden"], ["hidden", "weight"]], ids=str
)
def test_what_needs_no_gradient_gets_none(group, plan, frozen):
    case = Case(group, vocab_size=600)
    for options in ({}, {"smoothing": 0.1}, {"smoothing": 0.1, "softcap": 3.0}):
        case.check(plan=plan, frozen=frozen, **options)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("plan", [*PLANS, "auto"])
def test_without_gradients(group, plan):
    case = Case(group, vocab_size=600)
    expected = case.dense()
    for context in (torch.no_grad(), torch.inference_mode()):
        own = case.own()
        with context:
            loss = case.run(own, plan=plan, memory_budget=1)
        assert not loss.requires_grad
        case.assert_equal(loss.clone(), {}, expected, rtol=1e-12)
    loss, _ = case.check(plan=plan, frozen=["hidden", "weight", "bias"])
    assert not loss.requires_grad


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_padding_takes_no_probability(group, plan, smoothing):
    # The padding holds NaN, and there are ranks that hold nothing else.
    for vocab_size, padded in ((9, 16), (4, 24)):
        case = Case(group, vocab_size=vocab_size, padded=padded)
        _, own = case.check(plan=plan, smoothing=smoothing)
        first = balanced_range(padded, group.size(), group.rank())[0]
        padding = own["weight"].grad[max(vocab_size - first, 0) :]
        assert not padding.any()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("dtype", "rtol", "loss_rtol"),
    [
        (torch.float64, 1e-12, 1e-12),
        (torch.float32, 1e-5, 1e-6),
        # Of logits that bf16 and fp16 round to 2^-9 and 2^-12 of themselves.
        (torch.bfloat16, 3 * 2**-8, 2**-8),
        (torch.float16, 3 * 2**-11, 2**-11),
    ],
    ids=["fp64", "fp32", "bf16", "fp16"],
)
def test_dtypes(group, plan, dtype, rtol, loss_rtol):
    case = Case(group, (40, 3), 32, 700, dtype=dtype)
    case.target[0, :2] = -100
    for options in ({}, {"smoothing": 0.1}, {"softcap": 4.0, "z_loss": 1e-3, "temperature": 0.9}):
        case.check(rtol, plan=plan, loss_rtol=loss_rtol, **options)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("dtype", "rtol"),
    # fp32 logits near 1e4 are off by 6e-4, whatever is done with them then; these are whole numbers and one of 1/8.
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3 * 2**-8)],
    ids=["fp64", "fp32", "bf16"],
)
def test_logits_of_any_size(group, plan, dtype, rtol):
    case = Case(group, (12,), 8, 600, dtype=dtype)
    ids = torch.arange(600)
    for bias in (
        torch.full((600,), 1e4),
        torch.full((600,), -1e4),
        # A shard, or a slice, that is far below: with targets in it, whose gradient is all that it has.
        torch.where(ids < 300, 0.0, -1e4),
        torch.where(ids < 300, -60.0, 0.0),
        torch.where(ids % 256 < 40, 0.0, -30.0),
        torch.linspace(-1e4, 1e4, 600),
    ):
        case.whole["hidden"] = torch.randint(-2, 3, (12, 8)).to(dtype)
        case.whole["weight"] = torch.randint(-8, 9, (600, 8)).div(8).to(dtype)
        case.whole["bias"] = bias.round().to(dtype)
        case.target = torch.tensor([0, 1, 2, 299, 300, 301, 599, 598, -100, 41, 39, 256])
        if dtype == torch.bfloat16 and float(bias.abs().max()) > 1e3:
            # What bf16 leaves of the logits is not what the dense formula has.
            continue
        case.incoming = torch.rand(12, dtype=torch.float64) + 0.1
        case.check(rtol, plan=plan)
        case.check(rtol, plan=plan, z_loss=1e-4)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_nearly_certain_tokens_keep_their_gradient(group, plan, dtype):
    """1 - p is far below the rounding of p: subtracted in the logits' dtype, or after the product, it would be lost."""
    case = Case(group, (6, 2), 16, 300, dtype=dtype)
    case.whole["bias"] = case.whole["bias"] * 0
    hidden, weight = case.whole["hidden"], case.whole["weight"]
    # The target's row is along the hidden state, so that its logit is about 12 above all others.
    case.target = torch.arange(12).mul(25).view(6, 2)
    hidden.copy_(F.one_hot(torch.arange(12), 16).view(6, 2, 16) * 4)
    weight.mul_(0.0).add_(torch.randn(300, 16).mul(0.05).to(dtype))
    weight[case.target.flatten()] = (F.one_hot(torch.arange(12), 16) * 3.5).to(dtype)
    expected = case.dense()
    assert 0 < float(expected["loss"].max()) < 1e-3
    case.check(3e-3 if dtype == torch.float32 else 3 * 2**-7, plan=plan, loss_rtol=1e-2)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
def test_weight_gradient_in_main_grad(group, plan, dtype):
    case = Case(group, (40, 2), 16, 700, dtype=dtype, padded=720)
    case.filler = 0.0
    for options in ({}, {"smoothing": 0.1}):
        own = case.own()
        weight = own["weight"]
        with pytest.raises(
            ConfigError, match=r"adds to weight.main_grad, and the weight of shape \[\d+, 16\] has none"
        ):
            case.run(own, plan=plan, memory_budget=1, gradient_accumulation_fusion=True).sum().backward()
        own = case.own()
        weight = own["weight"]
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        before = torch.randn(weight.shape, dtype=wide)
        weight.main_grad = before.clone()
        loss = case.run(own, plan=plan, memory_budget=1, gradient_accumulation_fusion=True, **options)
        loss.backward(case.incoming.to(loss.dtype))
        assert weight.grad is None
        weight.grad = (weight.main_grad - before).to(dtype)
        case.assert_equal(loss, own, case.dense(**options), 1e-12 if dtype == torch.float64 else 3 * 2**-8)
        hooked = case.own()["weight"]
        hooked.main_grad, hooked.grad_added_to_main_grad = torch.zeros_like(hooked), False
        seen = []
        hooked.register_post_accumulate_grad_hook(lambda param, seen=seen: seen.append(param.grad.abs().sum().item()))
        case.run(own | {"weight": hooked}, plan=plan, gradient_accumulation_fusion=True).sum().backward()
        assert seen == [0.0]
        assert hooked.grad_added_to_main_grad


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("plan", PLANS)
def test_reductions(group, plan):
    case = Case(group)
    case.target[2] = -100
    each, _ = case.check(plan=plan)
    counted = int((case.target != -100).sum())
    for reduction, divisor in (("sum", 1), ("mean", counted)):
        case.incoming = torch.full((7, 3), 1.0 / divisor, dtype=torch.float64)
        own = case.own()
        loss = case.run(own, plan=plan, reduction=reduction)
        loss.backward()
        expected = case.dense()
        assert abs(loss.item() - float(each.sum()) / divisor) <= 1e-12 * abs(loss.item())
        case.assert_equal(each, own, expected, rtol=1e-12)
    case.target.fill_(-100)
    own = case.own()
    with pytest.warns(UserWarning, match="all 21 targets are -100"):
        loss = case.run(own, plan=plan, reduction="mean")
    loss.backward()
    assert loss.item() == 0.0
    assert [bool(tensor.grad.any()) for tensor in own.values()] == [False] * 3


@pytest.mark.ranks(2)
@pytest.mark.parametrize("plan", PLANS)
def test_a_kept_graph_can_be_used_again(group, plan):
    case = Case(group)
    own = case.own()
    loss = case.run(own, plan=plan, smoothing=0.1)
    leaves = list(own.values())
    first = torch.autograd.grad((loss * case.incoming).sum(), leaves, retain_graph=True)
    torch.autograd.grad(loss.sum(), leaves, retain_graph=True)
    again = torch.autograd.grad((loss * case.incoming).sum(), leaves, retain_graph=True)
    for one, other in zip(first, again, strict=True):
        assert_bit_equal(one, other)
    gradient = torch.autograd.grad((loss**2).sum(), leaves[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("plan", PLANS)
def test_recomputed(group, plan):
    case = Case(group)
    own = case.own()
    loss = recomputed(lambda hidden: case.run(own | {"hidden": hidden}, plan=plan), own["hidden"])
    loss.backward(case.incoming)
    case.assert_equal(loss, own, case.dense(), rtol=1e-12)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("plan", PLANS)
def test_autocast(group, plan):
    case = Case(group, (12, 2), 32, dtype=torch.float32)
    own = case.own()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = case.run(own, plan=plan)
    assert loss.dtype == torch.float32
    loss.backward(case.incoming.float())
    case.assert_equal(loss, own, case.dense(), rtol=4 * 2**-8)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("plan", PLANS)
def test_no_tokens(group, plan):
    for sequence_parallel in (False, True):
        case = Case(group, (0, 3))
        loss, own = case.check(plan=plan, sequence_parallel=sequence_parallel)
        assert loss.shape == (0, 3)
        assert not own["weight"].grad.any()


@pytest.mark.ranks(2)
def test_awkward_strides(group):
    for plan in PLANS:
        case = Case(group, vocab_size=600)
        own = {name: x.detach().mT.contiguous().mT.requires_grad_() for name, x in case.own().items() if x.dim() > 1}
        own["bias"] = case.own()["bias"]
        case.target = case.target.t().contiguous().t()
        loss = case.run(own, plan=plan, memory_budget=1)
        loss.backward(case.incoming.t().contiguous().t())
        case.assert_equal(loss, own, case.dense(), rtol=1e-12)


@pytest.mark.ranks(2)
def test_the_plan_follows_from_the_budget(group, monkeypatch):
    from shardwise.nn.loss import linear_cross_entropy

    case, taken = Case(group), []
    for name in ("LocalLogitsLoss", "ChunkedLoss"):
        function = getattr(linear_cross_entropy, name)

        class Noted:
            @staticmethod
            def apply(*args, function=function, name=name):
                taken.append(name)
                return function.apply(*args)

        monkeypatch.setattr(linear_cross_entropy, name, Noted)
    of_logits = 21 * case.own()["weight"].size(0) * 8
    case.run(case.own(), memory_budget=of_logits)
    case.run(case.own(), memory_budget=of_logits - 1)
    # Without a weight gradient there is no reason to keep logits.
    case.run(case.own(frozen=["weight", "bias"]), memory_budget=of_logits)
    assert taken == ["LocalLogitsLoss", "ChunkedLoss", "ChunkedLoss"]


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("plan", PLANS)
def test_wrong_input_is_told(group, plan):
    case, rank = Case(group, vocab_size=9), group.rank()
    own = case.own()

    def run(**changes):
        return case.run(own | changes, plan=plan)

    with pytest.raises(ShardingError, match=r"hidden \[7, 3, 10\] must end in the width of the weight \[\d, 11\]"):
        run(hidden=torch.randn(7, 3, 10))
    with pytest.raises(ShardingError, match=r"hidden \[3, 7, 11\] must have a row for each of target \[7, 3\]"):
        run(hidden=torch.randn(3, 7, 11))
    with pytest.raises(ShardingError, match=r"bias \[20\] must have one number for each row"):
        run(bias=torch.randn(20))
    with pytest.raises(ConfigError, match=r"hidden is torch.float32, weight torch.float64, bias torch.float64"):
        run(hidden=own["hidden"].detach().float())
    with pytest.raises(ConfigError, match=r"plan is 'fast'; choose one of auto, local_logits, chunked"):
        case.run(own, plan="fast")
    with pytest.raises(ConfigError, match="reduction is 'average'"):
        case.run(own, plan=plan, reduction="average")
    if group.size() == 3:
        with pytest.raises(
            ShardingError, match=rf"of target \[7, 3\], of which rank {rank} of 3 has \[{3 - (rank > 0)}"
        ):
            case.run(own, plan=plan, sequence_parallel=True)
        with pytest.raises(ShardingError, match=rf"rank {rank} of 3 has 3 logits .* vocabulary of 15 is 5"):
            vocab_parallel_linear_cross_entropy(
                own["hidden"], own["weight"], case.target, group=group, vocab_size=15, plan=plan
            )
    case.target[1, 2] = 9
    with pytest.raises(VocabularyError, match=r"target 9 at position \[1, 2\] is outside the vocabulary of 9 ids"):
        run()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("plan", PLANS)
def test_logits_that_are_no_numbers_are_told_on_every_rank(group, plan):
    case = Case(group, vocab_size=10)
    case.whole["bias"][7] = torch.nan
    rank_of_7 = 0 if group.size() == 1 else 1
    with pytest.raises(DivergenceError, match=rf"at token \[0, 0\] the logit of id 7 on rank {rank_of_7} is nan"):
        case.run(case.own(), plan=plan, check_finite=True)
    assert case.run(case.own(), plan=plan).isnan().all()
