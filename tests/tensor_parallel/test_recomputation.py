"""``checkpoint`` and ``CheckpointWithoutOutput``: the same gradients bit for bit, and the memory really free."""

import gc

import pytest
import torch
import torch.nn.functional as F
from harness.live_bytes import LiveBytes
from harness.parity import assert_bit_equal, assert_unmodified

from shardwise import parallel_state
from shardwise.core.errors import ConfigError, TopologyError
from shardwise.core.random import seed_streams, streams
from shardwise.megatron.config import ModelParallelConfig
from shardwise.tensor_parallel import ColumnParallelLinear
from shardwise.tensor_parallel.random import (
    CheckpointFunction,
    CheckpointWithoutOutput,
    CheckpointWithoutOutputFunction,
    _get_all_rng_states,
    _set_all_rng_states,
    checkpoint,
)


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def stochastic(x, weight):
    with streams().fork():
        return F.dropout((x @ weight).tanh(), 0.3).exp()


def is_of(tensor, nbytes):
    return tensor.untyped_storage().nbytes() == nbytes


class TestDistributedSavedActivations:
    @pytest.mark.ranks(1, 3)
    @pytest.mark.parametrize("shape", [(5, 7), (1,), (0, 3)])
    @pytest.mark.parametrize("call", [checkpoint, CheckpointFunction.apply])
    def test_the_input_is_a_chunk_until_backward(self, group, shape, call):
        parallel_state.initialize_model_parallel(group.size())
        torch.manual_seed(7)
        x, scale = leaf(*shape), leaf(*shape)
        whole, numel = x.detach().clone(), x.numel()
        seed_streams(5, group.rank())
        expected = F.dropout(x.exp() * scale, 0.0).sum()
        wanted = torch.autograd.grad(expected, [x, scale])
        output = call(lambda flag, x, y: (x.exp() * y, flag), True, "flag", x, scale)
        assert output[1] == "flag"
        size = -(-numel // group.size())
        assert x.shape == (size,)
        assert is_of(x, size * 8)
        padded = F.pad(whole.flatten(), (0, size * group.size() - numel))
        if size < numel:
            assert_bit_equal(x, padded[group.rank() * size :][:size])
        output[0].sum().backward()
        assert_bit_equal(x.grad, wanted[0])
        assert_bit_equal(scale.grad, wanted[1])
        # From the recomputation on it is whole again, for what was computed from it before.
        assert_bit_equal(x, whole)

    @pytest.mark.ranks(2)
    def test_the_full_storage_is_free(self, group):
        x = leaf(64, 64)
        with LiveBytes() as made:
            hidden = x * 2
            output = checkpoint(lambda h: h.sin().cos().sum(), True, hidden, tp_group=group)
        assert made.count() == 64 * 64 * 8 // 2 + 8
        expected = torch.autograd.grad((x * 2).sin().cos().sum(), x)[0]
        assert_bit_equal(torch.autograd.grad(output, x)[0], expected)
        # After backward the output does not keep it.
        del hidden
        assert made.count() == 8

    @pytest.mark.ranks(2)
    def test_the_layout_in_memory_comes_back(self, group):
        torch.manual_seed(7)
        x = torch.randn(6, 5, dtype=torch.float64).t().requires_grad_()
        x = torch.empty_strided((5, 6), (1, 5), dtype=torch.float64).copy_(x.detach()).requires_grad_()
        strides = []

        def function(x):
            strides.append(x.stride())
            return (x @ x.t()).exp()

        output = checkpoint(function, True, x, tp_group=group)
        output.sum().backward()
        assert strides == [(1, 5), (1, 5)]

    @pytest.mark.ranks(2)
    def test_a_function_that_saves_nothing_and_one_that_needs_no_gradient(self, group):
        parallel_state.initialize_model_parallel(2)
        x = leaf(3, 3)
        whole = x.detach().clone()
        output = checkpoint(lambda x, y: x + y, True, x, torch.ones(3, 3))
        assert x.shape == (5,)
        output.sum().backward()
        assert_bit_equal(x.grad, torch.ones_like(whole))
        assert_bit_equal(x, whole)
        for enabled in (True, False):
            plain = torch.ones(4, 4)
            with torch.set_grad_enabled(enabled):
                output = checkpoint(lambda x, y: x + y, True, plain, torch.ones(4, 4) * 2)
            assert_bit_equal(output, torch.ones(4, 4) * 3)
            assert_bit_equal(plain, torch.ones(8))

    @pytest.mark.ranks(2)
    @pytest.mark.parametrize("outer", [False, True])
    def test_nested(self, group, outer):
        torch.manual_seed(7)
        x = leaf(5, 5)

        def inner(h):
            return h.sin().exp()

        def function(x):
            return checkpoint(inner, True, x * 3, tp_group=group).tanh()

        expected = torch.autograd.grad(inner(x * 3).tanh().sum(), x)[0]
        output = checkpoint(function, outer, x, tp_group=group).sum()
        for _ in range(2):
            assert_bit_equal(torch.autograd.grad(output, x, retain_graph=True)[0], expected)

    @pytest.mark.ranks(2)
    def test_nested_keeps_the_outer_function_s_arguments_only(self, group):
        x = leaf(8, 8)

        def function(x):
            hidden = x
            for _ in range(3):
                hidden = checkpoint(torch.sin, True, hidden * 3, tp_group=group)
            return hidden.sum()

        with LiveBytes() as made:
            output = checkpoint(function, False, x)
        assert made.count() == 8
        output.backward()
        hidden = x
        for _ in range(3):
            hidden = (hidden * 3).sin()
        assert_bit_equal(x.grad, torch.autograd.grad(hidden.sum(), x)[0])

    @pytest.mark.ranks(2)
    @pytest.mark.parametrize("requires_grad", [False, True])
    def test_a_function_that_returns_its_argument(self, group, requires_grad):
        x = torch.ones(3, 3, requires_grad=requires_grad)
        output = checkpoint(lambda x: x, True, x, tp_group=group)
        assert x.shape == (5,)
        assert_bit_equal(output, torch.ones(3, 3))
        if requires_grad:
            (output * 2).sum().backward()
            assert_bit_equal(x.grad, torch.full((3, 3), 2.0))

    @pytest.mark.ranks(1)
    def test_what_cannot_be_distributed(self, group):
        x = leaf(4, 4)
        with pytest.raises(TopologyError, match="no group was given"):
            checkpoint(torch.sin, True, x)
        with pytest.raises(ConfigError, match="needs a tensor among the positional arguments"):
            checkpoint(lambda n: n, True, 3, tp_group=group)
        with pytest.raises(ConfigError, match=r"first tensor, of shape \[2, 4\], is a view"):
            checkpoint(torch.sin, True, x[:2], tp_group=group)
        assert x.shape == (4, 4)


class TestCheckpointWithoutOutput:
    def test_gradients_and_random_numbers_are_those_of_a_plain_call(self):
        x, weight, after = leaf(3, 5), leaf(5, 7), leaf(3, 7)
        leaves = [x, weight, after]
        seed_streams(5, 0)
        state = streams().get_states()
        output = stochastic(x, weight) * after
        expected = (output, *torch.autograd.grad(output.sum(), leaves))
        streams().set_states(state)
        recompute = CheckpointWithoutOutput()
        with assert_unmodified(*leaves):
            hidden = recompute.checkpoint(stochastic, x, weight)
            output = hidden * after
            recompute.discard_output_and_register_recompute(output)
            assert is_of(hidden, 0)
            assert hidden.shape == (3, 7)
            before = streams().get_states()
            for _ in range(2):
                actual = (output, *torch.autograd.grad(output.sum(), leaves, retain_graph=True))
                for a, e in zip(actual, expected, strict=True):
                    assert_bit_equal(a, e)
            # What was freed is there again, in its old place.
            assert is_of(hidden, 3 * 7 * 8)
        for name, value in streams().get_states().items():
            assert_bit_equal(value, before[name])

    def test_the_storages_are_free(self):
        x, weight = leaf(64, 64), leaf(64, 64)

        def function(x):
            y = x.sin().exp()
            return y, "text", y.cos()

        with LiveBytes() as made:
            recompute = CheckpointWithoutOutput()
            first, text, second = recompute.checkpoint(function, x)
            output = ((first * weight) @ second).sum()
            held = made.count()
            recompute.discard_output_and_register_recompute(output)
            freed = held - made.count()
        assert text == "text"
        assert is_of(first, 0)
        assert is_of(second, 0)
        nbytes = 64 * 64 * 8
        assert freed == 2 * nbytes
        # The product is what the matrix multiplication saved.
        assert made.count() == nbytes + 8
        actual = torch.autograd.grad(output, [x, weight])
        y = x.sin().exp()
        expected = torch.autograd.grad(((y * weight) @ y.cos()).sum(), [x, weight])
        for a, e in zip(actual, expected, strict=True):
            assert_bit_equal(a, e)

    @pytest.mark.parametrize("backward", [False, True])
    def test_nothing_outlives_the_graph(self, backward):
        gc.collect()
        gc.disable()
        try:
            with LiveBytes() as made:
                x = leaf(8, 8) * 2
                recompute = CheckpointWithoutOutput()
                hidden = recompute.checkpoint(lambda x: x.sin().exp(), x)
                output = (hidden * hidden).sum()
                recompute.discard_output_and_register_recompute(output)
                if backward:
                    output.backward()
            del x, recompute, hidden
            if backward:
                # The output alone is left, and through its graph the leaf with its gradient.
                assert made.count() == 8 + 2 * 8 * 8 * 8
            del output
            assert made.count() == 0
        finally:
            gc.enable()

    def test_an_object_is_used_again(self):
        x = leaf(4, 4)
        recompute = CheckpointWithoutOutput()
        y = x
        for _ in range(3):
            hidden = recompute.checkpoint(torch.sin, y)
            y = hidden * hidden
            recompute.discard_output_and_register_recompute(y)
        z = x
        for _ in range(3):
            z = z.sin() * z.sin()
        expected = torch.autograd.grad((x.sin() ** 2).sin().pow(2).sin().pow(2).sum(), x)[0]
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], expected, rtol=1e-12, atol=1e-12)

    def test_an_output_that_needs_no_gradient_is_recomputed_for_the_weight(self):
        x, weight = torch.randn(3, 4), torch.randn(3, 4, requires_grad=True)
        recompute = CheckpointWithoutOutput()
        hidden = recompute.checkpoint(torch.sin, x)
        output = hidden * weight
        recompute.discard_output_and_register_recompute(output)
        assert is_of(hidden, 0)
        assert_bit_equal(torch.autograd.grad(output.sum(), weight)[0], x.sin())

    @pytest.mark.parametrize("outer", ["checkpoint", "without output"])
    def test_nested(self, outer):
        x, weight = leaf(4, 4), leaf(4, 4)
        freed, made = [], []

        def function(x, weight):
            recompute = CheckpointWithoutOutput()
            hidden = recompute.checkpoint(stochastic, x, weight)
            output = hidden * weight
            recompute.discard_output_and_register_recompute(output)
            freed.append(is_of(hidden, 0))
            made.append(hidden)
            return output.tanh()

        def plain(x, weight):
            return (stochastic(x, weight) * weight).tanh()

        results = []
        for body in (plain, function):
            seed_streams(5, 0)
            if outer == "checkpoint":
                output = checkpoint(body, False, x, weight) * weight
            else:
                recompute = CheckpointWithoutOutput()
                output = recompute.checkpoint(body, x, weight) * weight
                recompute.discard_output_and_register_recompute(output)
            results.append((output, *torch.autograd.grad(output.sum(), [x, weight])))
        # The recomputation's own output is kept, for backward to use; that of the first forward is never wanted again.
        assert freed == [True, False]
        assert is_of(made[0], 0)
        for actual, expected in zip(*reversed(results), strict=True):
            assert_bit_equal(actual, expected)

    def test_a_checkpoint_inside(self):
        x, weight = leaf(4, 4), leaf(4, 4)
        results = []
        for inner in (stochastic, lambda *args: checkpoint(stochastic, False, *args)):
            seed_streams(5, 0)
            recompute = CheckpointWithoutOutput()
            hidden = recompute.checkpoint(lambda x, w, inner=inner: inner(x, w).sin(), x, weight)
            output = hidden * weight
            recompute.discard_output_and_register_recompute(output)
            results.append(torch.autograd.grad(output.sum(), [x, weight]))
        for actual, expected in zip(*reversed(results), strict=True):
            assert_bit_equal(actual, expected)

    def test_without_gradients(self):
        x = leaf(4, 4)
        recompute = CheckpointWithoutOutput()
        with torch.no_grad():
            hidden = recompute.checkpoint(torch.sin, x)
            output = hidden * 2
            recompute.discard_output_and_register_recompute(output)
        assert is_of(hidden, 0)
        assert_bit_equal(output, x.sin() * 2)

    def test_an_error_in_the_recomputation_leaves_the_random_numbers_alone(self):
        x, weight = leaf(4, 4), leaf(4, 4)
        seed_streams(5, 0)
        times = []

        def failing(x, weight):
            result = stochastic(x, weight)
            times.append(1)
            if len(times) == 2:
                raise ZeroDivisionError
            return result

        recompute = CheckpointWithoutOutput()
        output = recompute.checkpoint(failing, x, weight) * 2
        recompute.discard_output_and_register_recompute(output)
        # Further than the recomputation gets.
        stochastic(x, weight)
        before = torch.get_rng_state(), streams().get_states()
        with pytest.raises(ZeroDivisionError):
            output.sum().backward()
        assert_bit_equal(torch.get_rng_state(), before[0])
        for name, state in streams().get_states().items():
            assert_bit_equal(state, before[1][name])

    def test_compiled(self):
        x = leaf(4, 4)

        def function(x):
            recompute = CheckpointWithoutOutput()
            hidden = recompute.checkpoint(torch.sin, x)
            output = hidden * hidden
            recompute.discard_output_and_register_recompute(output)
            return output.sum()

        actual = torch.autograd.grad(torch.compile(function, fullgraph=True, backend="aot_eager")(x), x)[0]
        torch.testing.assert_close(actual, 2 * x.sin() * x.cos(), rtol=1e-12, atol=1e-12)

    def test_what_cannot_be(self):
        x = leaf(4, 4)
        with pytest.raises(ConfigError, match="fp8 recomputation is not offered"):
            CheckpointWithoutOutput(fp8=True)
        recompute = CheckpointWithoutOutput()
        with pytest.raises(ConfigError, match="no outputs of a recomputed function to discard; call it first"):
            recompute.discard_output_and_register_recompute(x)
        with pytest.raises(ConfigError, match="an output shares its memory with an argument"):
            recompute.checkpoint(lambda x: x[:2], x)
        hidden = recompute.checkpoint(torch.sin, x)
        for wrong, message in (
            (hidden.detach() * 2, r"hook_tensor of shape \[4, 4\] requires no gradient"),
            (hidden[:1], "hook_tensor shares its memory with an output"),
        ):
            with pytest.raises(ConfigError, match=message):
                recompute.discard_output_and_register_recompute(wrong)
            assert_bit_equal(hidden, x.sin())
        output = hidden * 2
        recompute.discard_output_and_register_recompute(output)
        with pytest.raises(ConfigError, match="discard only once"):
            recompute.discard_output_and_register_recompute(output)
        with torch.no_grad():
            hidden = recompute.checkpoint(torch.sin, x)
        with pytest.raises(ConfigError, match="ran under no_grad"):
            recompute.discard_output_and_register_recompute(hidden * x)


class TestFunctions:
    """What Megatron's autograd functions are to programs: nodes with a forward and a backward."""

    def block(self, group):
        torch.manual_seed(7)
        options = {"config": ModelParallelConfig(params_dtype=torch.float64), "tp_group": group}
        layer = ColumnParallelLinear(5, 6, init_method=torch.nn.init.normal_, gather_output=True, **options)

        def function(x, scale, nothing=None):
            with streams().fork("model-parallel-rng"):
                return (F.dropout(layer(x)[0], 0.3) * scale).exp(), "text", nothing

        return layer, function

    def plain(self, group):
        layer, function = self.block(group)
        seed_streams(5, group.rank())
        x, scale = leaf(3, 5), leaf(6)
        output = function(x, scale)[0]
        output.square().sum().backward()
        return x, scale, (output, x.grad, scale.grad, layer.weight.grad, layer.bias.grad)

    def check(self, expected, output, x, scale, layer):
        actual = output, x.grad, scale.grad, layer.weight.grad, layer.bias.grad
        for mine, theirs in zip(actual, expected, strict=True):
            assert_bit_equal(mine, theirs)

    @pytest.mark.ranks(2)
    def test_a_node_is_gone_back_through_with_one_recomputation(self, group):
        x, scale, expected = self.plain(group)
        layer, function = self.block(group)
        assert issubclass(CheckpointFunction, torch.autograd.Function)
        seed_streams(5, group.rank())
        x, scale = x.detach().requires_grad_(), scale.detach().requires_grad_()
        with assert_unmodified(x, scale):
            output, text, nothing = CheckpointFunction.apply(function, False, x, scale, None)
            assert type(output.grad_fn).__name__ == "CheckpointFunctionBackward"
            assert (text, nothing) == ("text", None)
            before = streams().get_states()
            output.square().sum().backward()
        self.check(expected, output, x, scale, layer)
        for name, value in streams().get_states().items():
            assert_bit_equal(value, before[name])
        again = CheckpointFunction.apply(function, False, x, scale)[0].sum()
        with pytest.raises(RuntimeError, match=r"use backward\(\), or tensor_parallel\.checkpoint\(\)"):
            torch.autograd.grad(again, x)

    @pytest.mark.ranks(1)
    def test_arguments_on_a_device_without_autocast(self, group):
        x = torch.ones(2, device="meta", requires_grad=True)
        CheckpointFunction.apply(torch.sin, False, x).sum().backward()
        assert x.grad is not None

    @pytest.mark.ranks(1)
    def test_the_recomputation_has_the_autocast_of_the_forward(self, group):
        first, second = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
        params, x = (*first.parameters(), *second.parameters()), torch.randn(3, 16)

        def gradients(call):
            with torch.autocast("cpu", torch.bfloat16):
                loss = call(x).float().sum()
            for param in params:
                param.grad = None
            loss.backward()
            return [param.grad for param in params]

        def discarded(x):
            recompute = CheckpointWithoutOutput()
            hidden = CheckpointWithoutOutputFunction.apply(first, recompute, x.clone().requires_grad_())
            output = second(hidden)
            recompute.discard_output_and_register_recompute(output)
            return output

        expected = gradients(lambda x: second(first(x)))
        both = torch.nn.Sequential(first, second)
        for call in (lambda x: CheckpointFunction.apply(both, False, x.clone().requires_grad_()), discarded):
            for gradient, plain in zip(gradients(call), expected, strict=True):
                assert_bit_equal(gradient, plain)

    @pytest.mark.ranks(2)
    def test_a_node_frees_its_outputs(self, group):
        x, scale, expected = self.plain(group)
        layer, function = self.block(group)

        class Theirs(CheckpointWithoutOutput):
            """As a program overrides it, on the function below it."""

            def checkpoint(self, run_function, *args):
                outputs = CheckpointWithoutOutputFunction.apply(run_function, self, *args)
                self.outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                return outputs

        seed_streams(5, group.rank())
        x, scale = x.detach().requires_grad_(), scale.detach().requires_grad_()
        recompute = Theirs()
        hidden = recompute.checkpoint(function, x, scale)[0]
        assert type(hidden.grad_fn).__name__ == "CheckpointWithoutOutputFunctionBackward"
        assert recompute.ctx.saved_tensors[0] is x
        values = hidden.detach().clone()
        output = hidden.square()
        recompute.discard_output_and_register_recompute(output)
        assert is_of(hidden, 0)
        output.sum().backward()
        assert_bit_equal(hidden, values)
        self.check(expected, hidden, x, scale, layer)
        with pytest.raises(ConfigError, match="an output shares its memory with an argument"):
            CheckpointWithoutOutputFunction.apply(lambda x: x[:2], Theirs(), leaf(3))

    @pytest.mark.ranks(2)
    def test_what_an_object_knows_of_its_call(self, group):
        x, scale, expected = self.plain(group)
        layer, function = self.block(group)
        seed_streams(5, group.rank())
        x, scale = x.detach().requires_grad_(), scale.detach().requires_grad_()
        recompute = CheckpointWithoutOutput()
        assert (recompute.ctx, recompute.outputs, recompute.rng_states, recompute.fp8) == (None, None, None, False)
        recompute._recompute(None)
        first = recompute.checkpoint(function, x, scale)
        hidden, text, _ = recompute.outputs
        assert hidden is first[0]
        assert text == "text"
        # From them on the function draws what it drew.
        torch.rand(3)
        now = _get_all_rng_states()
        _set_all_rng_states(*recompute.rng_states)
        with torch.no_grad():
            assert_bit_equal(function(x, scale)[0], hidden)
        _set_all_rng_states(*now)
        values = hidden.detach().clone()
        output = hidden.square().sum()
        recompute.discard_output_and_register_recompute(output)
        assert is_of(hidden, 0)
        assert recompute.ctx is not None
        for _ in range(2):
            # By hand, before the gradient sets it off, and once more in vain.
            recompute._recompute(None)
            assert_bit_equal(hidden, values)
            assert (recompute.ctx, recompute.outputs, recompute.rng_states) == (None, None, None)
        output.backward()
        self.check(expected, hidden, x, scale, layer)
