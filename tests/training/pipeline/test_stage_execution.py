"""What a stage really does: its order of steps, what it holds meanwhile, and how it ends when something goes wrong."""

from __future__ import annotations

import contextlib

import pytest
import torch
from harness.live_bytes import LiveBytes
from harness.parity import assert_close_to
from training.pipeline.pipelines import random_batch, run_whole, staged_gpt

from shardwise.core.errors import ConfigError, DesyncError, ShardingError
from shardwise.nn import weight_gradient
from shardwise.tensor_parallel import checkpoint
from shardwise.training.pipeline import Kind, Pipeline, make_schedule, stage as stage_module

ORDER = {
    ("gpipe", 0): "F0 F1 F2 F3 B0 B1 B2 B3",
    ("gpipe", 1): "F0 F1 F2 F3 B0 B1 B2 B3",
    ("1f1b", 0): "F0 F1 B0 F2 B1 F3 B2 B3",
    ("1f1b", 1): "F0 B0 F1 B1 F2 B2 F3 B3",
    ("interleaved", 0): "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3",
    ("interleaved", 1): "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3",
    ("zero-bubble", 0): "F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3",
    ("zero-bubble", 1): "F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3",
}
IN_FLIGHT = {"gpipe": [4, 4], "1f1b": [2, 1], "interleaved": [5, 3], "zero-bubble": [2, 2]}
CHUNKS = {"interleaved": 2}
TELLING = [
    pytest.param(name, marks=[] if name in ("interleaved", "zero-bubble") else pytest.mark.slow) for name in IN_FLIGHT
]


def staged_for(name, pp, **options):
    num_chunks = CHUNKS.get(name, 1)
    return staged_gpt(
        pp=pp,
        num_chunks=num_chunks,
        num_layers=pp * num_chunks,
        delay_wgrad_compute=name == "zero-bubble",
        **options,
    ), num_chunks


class Recorder:
    """Notes each forward, the start of each backward, and each weight gradient of one linear layer of each chunk."""

    def __init__(self, staged, monkeypatch):
        self.events = []
        self._inputs = {}
        self._gradients = {}
        self._backward = None
        self._micro_batches = [0] * len(staged.chunks)
        for chunk, model in enumerate(staged.chunks):
            layer = model.decoder.layers[0].mlp.linear_fc2
            model.register_forward_hook(lambda *call, chunk=chunk: self._forward(chunk, call[2]))
            layer.register_forward_pre_hook(lambda _, inputs, chunk=chunk: self._input(chunk, inputs[0]))
            layer.weight.register_post_accumulate_grad_hook(self._accumulated)
        compute = weight_gradient.compute_weight_gradients_

        def recorded(weight, inputs, grad_outputs, **options):
            addresses = [input_.data_ptr() for input_ in inputs]
            compute(weight, inputs, grad_outputs, **options)
            for address in addresses:
                if address in self._inputs:
                    self.events.append(("W", *self._inputs[address][0]))
                    self._gradients[weight] = weight.grad.clone()

        monkeypatch.setattr(weight_gradient, "compute_weight_gradients_", recorded)

    def _accumulated(self, weight):
        # Autograd also calls where it was given no gradient to add.
        before = self._gradients.get(weight)
        if weight.grad is not None and (before is None or not weight.grad.equal(before)):
            self.events.append(("W", *self._backward))
            self._gradients[weight] = weight.grad.clone()

    def _input(self, chunk, input_):
        # Kept, so that its address stays its own.
        self._inputs[input_.data_ptr()] = (self._micro_batches[chunk], chunk), input_

    def _forward(self, chunk, output):
        step = self._micro_batches[chunk], chunk
        self._micro_batches[chunk] += 1
        self.events.append(("F", *step))
        output.register_hook(lambda _: self._start_backward(step))

    def _start_backward(self, step):
        self._backward = step
        self.events.append(("I", *step))

    def in_flight(self):
        held = most = 0
        for kind, _, _ in self.events:
            held += (kind == "F") - (kind == "W")
            most = max(most, held)
        return most


def steps_of(action):
    """A table's entry as what can be seen of it."""
    letter, _, rest = action[0], None, action[1:]
    micro_batch, _, chunk = rest.partition(".")
    step = int(micro_batch), int(chunk or 0)
    return [("I", *step), ("W", *step)] if letter == "B" else [(letter, *step)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", IN_FLIGHT)
def test_the_steps_that_are_executed_are_the_tables(group, monkeypatch, name):
    staged, num_chunks = staged_for(name, 2)
    recorder = Recorder(staged, monkeypatch)
    schedule = make_schedule(name, 2, 4, num_chunks)
    staged.run(schedule, random_batch(4))
    expected = ORDER[name, group.rank()].split()
    assert recorder.events == [step for action in expected for step in steps_of(action)]
    assert list(map(str, schedule.actions[group.rank()])) == expected
    assert recorder.in_flight() == IN_FLIGHT[name][group.rank()] == schedule.in_flight(group.rank())


@pytest.mark.ranks(2)
def test_1f1b_holds_less_than_gpipe(group):
    def peak(name, m):
        """Live bytes at the end of the forward step that has most, and bytes of gradients."""
        staged, _ = staged_for(name, 2)
        counts = []
        with LiveBytes() as live:
            for chunk in staged.chunks:
                chunk.register_forward_hook(lambda *_: counts.append(live.count()))
            staged.run(make_schedule(name, 2, m), random_batch(m))
        return max(counts), sum(param.grad.nbytes for param in staged.chunks.parameters())

    (gpipe, gradients), (gpipe_twice, _) = peak("gpipe", 4), peak("gpipe", 8)
    of_one = (gpipe_twice - gpipe) / 4
    rest = gpipe - 4 * of_one
    for m in (4, 8):
        held, _ = peak("1f1b", m)
        # The rest is the same for both; the memory that the ranks share is most of it.
        assert held - rest < 0.85 * (gpipe - rest)
        # Its forward steps come after backward steps, so there are gradients too; GPipe's do not.
        assert (held - rest - gradients) / of_one == pytest.approx(2 if group.rank() == 0 else 1, abs=0.25)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", TELLING)
def test_an_error_in_one_stage_ends_all_and_the_next_step_is_right(group, name):
    staged, num_chunks = staged_for(name, 2)
    schedule = make_schedule(name, 2, 4, num_chunks)
    batch = random_batch(4)
    for failing_stage, error in ((0, ConfigError("flag 7 is wrong")), (1, ZeroDivisionError("by nought"))):
        calls = []

        def fail_at_the_third(*call, error=error, calls=calls):
            calls.append(call)
            if len(calls) == 3:
                raise error

        hook = None
        if group.rank() == failing_stage:
            hook = staged.chunks[0].register_forward_hook(fail_at_the_third)
        if isinstance(error, ConfigError):
            expected, words = ConfigError, "flag 7 is wrong"
        elif group.rank() == failing_stage:
            expected, words = ZeroDivisionError, "by nought"
        else:
            expected, words = DesyncError, "rank 1 failed with ZeroDivisionError"
        with pytest.raises(expected, match=words):
            staged.run(schedule, batch)
        if hook is not None:
            hook.remove()
    staged.chunks.zero_grad()
    staged.run(schedule, batch)
    whole = staged_gpt(num_layers=2 * num_chunks)
    run_whole(whole.chunks[0], batch)
    expected_grads = whole.parameters_by_key()
    for key, shard in staged.parameters_by_key().items():
        if key != "embedding.word_embeddings.weight":
            assert_close_to(shard.data.grad, expected_grads[key].data.grad, rtol_of_norm=1e-12, name=key)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["1f1b", "zero-bubble"])
def test_an_error_in_the_backward_ends_all_and_leaves_no_gradient(group, name):
    (staged, _), (other, _) = staged_for(name, 2), staged_for(name, 2)
    schedule, batch = make_schedule(name, 2, 3), random_batch(3)

    def fail(_):
        raise ConfigError("no backward today")

    hooks = []
    if group.rank() == 0:
        # Behind the layers, whose weight gradients may be waiting.
        part = staged.chunks[0].embedding
        hooks.append(part.register_forward_hook(lambda *call: call[2].register_hook(fail) and None))
    with pytest.raises(ConfigError, match="no backward today"):
        staged.run(schedule, batch)
    for hook in hooks:
        hook.remove()
    staged.chunks.zero_grad()
    for each in (staged, other):
        each.run(schedule, batch)
    for own, expected in zip(staged.chunks.parameters(), other.chunks.parameters(), strict=True):
        assert_close_to(own.grad, expected.grad, rtol_of_norm=1e-12)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("name", "number"), [("1f1b", 3), ("zero-bubble", 3 + 3), ("interleaved", 2 * 3)])
def test_all_steps_with_gradients_but_the_last_are_without_synchronization(group, name, number):
    """The last backward of each chunk, and its last step of weight gradients."""
    entered = []

    @contextlib.contextmanager
    def no_sync():
        entered.append(name)
        yield

    staged, num_chunks = staged_for(name, 2)
    staged.run(make_schedule(name, 2, 4, num_chunks), random_batch(4), no_sync=no_sync)
    assert len(entered) == number


@pytest.mark.ranks(2)
def test_uneven_micro_batches_are_refused_on_every_stage(group):
    staged, _ = staged_for("1f1b", 2)
    tokens, labels = random_batch(3)
    pipeline = Pipeline(list(staged.chunks), group=staged.topology.group("pp"))
    lengths = [11, 11, 9]

    def forward(micro_batch, chunk):
        s = lengths[micro_batch]
        return staged.chunks[chunk](tokens[micro_batch, :, :s], labels=labels[micro_batch, :, :s])

    with pytest.raises(ShardingError, match=r"micro-batch 2: stage 0 made .* \[9, 2, 24\], .* \[11, 2, 24\]; every"):
        pipeline.run(
            make_schedule("1f1b", 2, 3),
            forward,
            lambda _, losses: (losses.sum(), None),
            shape=(11, 2, 24),
            dtype=torch.float64,
            device=torch.device("cpu"),
        )


@pytest.mark.ranks(2)
def test_a_stage_that_was_not_told_its_place_is_an_error_on_all(group):
    told = r"needs pre_process={}, post_process={}; pass pre_process= and post_process= to each stage's model"
    # Whole models on all stages, as by the defaults of both arguments.
    whole = staged_gpt(num_layers=2, tied=False)
    message = r"stage 0 of 2 was made with pre_process=True, post_process=True, and .*" + told.format("True", "False")
    with pytest.raises(ConfigError, match=message):
        _on_stages(whole.chunks, group, "1f1b")
    # On one stage alone, and on one of its chunks.
    for name, num_chunks, place in (("1f1b", 1, "the model on"), ("interleaved", 2, "the model of chunk 1 on")):
        staged, _ = staged_for(name, 2)
        if group.rank() == 1:
            staged.chunks[-1].post_process = False
        message = rf"{place} pipeline stage 1 of 2 was made with .*{told.format('False', 'True')}"
        with pytest.raises(ConfigError, match=message):
            staged.run(make_schedule(name, 2, 2, num_chunks), random_batch(2))
    # Where one stage is the whole model it must have both.
    whole.chunks[0].post_process = False
    with pytest.raises(ConfigError, match=r"stage 0 of 1 was made with .*" + told.format("True", "True")):
        _on_stages(whole.chunks, whole.topology.group("pp"), "1f1b")


def _on_stages(chunks, group, name):
    Pipeline(list(chunks), group=group).run(
        make_schedule(name, group.size(), 2, len(chunks)),
        lambda *_: pytest.fail("no forward is called"),
        lambda *_: pytest.fail("no loss is asked for"),
        shape=(11, 2, 24),
        dtype=torch.float64,
        device=torch.device("cpu"),
    )


@pytest.mark.ranks(2)
def test_stages_that_disagree_hear_of_it(group):
    staged, _ = staged_for("1f1b", 2)
    name = "gpipe" if group.rank() == 0 else "1f1b"
    with pytest.raises(DesyncError, match=r"disagree on the pipeline's schedule.*'gpipe'.*'1f1b'"):
        staged.run(make_schedule(name, 2, 2), random_batch(2))


@pytest.mark.ranks(2)
def test_what_a_pipeline_refuses(group):
    staged, _ = staged_for("1f1b", 2)
    with pytest.raises(ConfigError, match="made for 2 stages of 2 chunks; this pipeline has 2 stages of 1"):
        staged.run(make_schedule("interleaved", 2, 2, 2), random_batch(2))
    with pytest.raises(ConfigError, match=r"'zero-bubble' .* set config.delay_wgrad_compute=True"):
        staged.run(make_schedule("zero-bubble", 2, 2), random_batch(2))
    pp = staged.topology.group("pp")
    with pytest.raises(ConfigError, match="at least one chunk"):
        Pipeline([], group=pp)
    with pytest.raises(ConfigError, match="type Linear has no set_input_tensor"):
        Pipeline([torch.nn.Linear(2, 2)], group=pp)
    assert {kind.value for kind in Kind} == set("FBIW")


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", TELLING)
def test_a_whole_chunk_may_be_recomputed(group, name):
    """It asks for its input again when later micro-batches have had theirs."""
    num_chunks = 2 if name == "interleaved" else 1
    batch = random_batch(2 * group.size())
    gradients = []
    for recomputed in (False, True):
        options = {"delay_wgrad_compute": name == "zero-bubble"}
        staged = staged_gpt(pp=group.size(), num_chunks=num_chunks, num_layers=2 * group.size() + 1, **options)
        if recomputed:
            for chunk in staged.chunks:
                forward = chunk.forward
                chunk.forward = lambda tokens, labels, forward=forward: checkpoint(
                    lambda ids: forward(ids, labels=labels), False, tokens
                )
        staged.run(make_schedule(name, group.size(), 2 * group.size(), num_chunks), batch)
        gradients.append({key: shard.data.grad for key, shard in staged.parameters_by_key().items()})
    assert gradients[0]
    for key, gradient in gradients[0].items():
        assert_close_to(gradients[1][key], gradient, rtol_of_norm=1e-14, name=key)


@pytest.mark.ranks(2)
def test_the_first_error_is_the_one_that_is_told(group):
    """Whoever failed says why, even where its neighbours cannot be told any more."""
    staged, num_chunks = staged_for("1f1b", 2)
    schedule = make_schedule("1f1b", 2, 4, num_chunks)

    def fail(*_):
        raise MemoryError("too much")

    staged.chunks[0].register_forward_hook(fail)

    def broken(*_args, **_kwargs):
        raise DesyncError("the other stage is gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_module._Step, "_end_alike", lambda _: None)
        patch.setattr(stage_module, "exchange", broken)
        with pytest.raises(MemoryError if group.rank() == 0 else DesyncError) as caught:
            staged.run(schedule, random_batch(4))
    if group.rank() == 0:
        assert isinstance(caught.value.__cause__, DesyncError)


@pytest.mark.ranks(2)
def test_stages_that_disagree_in_a_later_step_hear_of_it(group):
    staged, num_chunks = staged_for("1f1b", 2)
    pipeline = Pipeline(list(staged.chunks), group=group)

    def run(m):
        tokens, labels = random_batch(m)
        return pipeline.run(
            make_schedule("1f1b", 2, m, num_chunks),
            lambda micro_batch, _: staged.chunks[0](tokens[micro_batch], labels=labels[micro_batch]),
            lambda _, losses: (losses.sum(), None),
            shape=(tokens.size(2), tokens.size(1), 24),
            dtype=torch.float64,
            device=torch.device("cpu"),
        )

    run(4)
    run(2)
    with pytest.raises(DesyncError, match="micro-batches"):
        run(4 if group.rank() else 2)
    run(4)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("recomputed", [False, True])
def test_messages_of_another_dtype(group, recomputed):
    """Layers compute in their own; what is sent is rounded, and the gradient that comes back."""
    tokens, labels = random_batch(4)

    def gradients(dtype):
        staged = staged_gpt(pp=2)
        chunk = staged.chunks[0]

        def forward(micro_batch, _):
            if recomputed:
                return checkpoint(lambda ids: chunk(ids, labels=labels[micro_batch]), False, tokens[micro_batch])
            return chunk(tokens[micro_batch], labels=labels[micro_batch])

        Pipeline([chunk], group=group).run(
            make_schedule("1f1b", 2, 4),
            forward,
            lambda _, losses: (losses.sum() / tokens.numel(), None),
            shape=(tokens.size(2), tokens.size(1), 24),
            dtype=dtype,
            input_dtype=torch.float64,
            device=torch.device("cpu"),
        )
        return {key: shard.data.grad for key, shard in staged.parameters_by_key().items()}

    expected, rounded = gradients(torch.float64), gradients(torch.float32)
    norm = sum(gradient.square().sum() for gradient in expected.values()).sqrt()
    difference = sum((rounded[key] - gradient).square().sum() for key, gradient in expected.items()).sqrt()
    # Rounded to fp32 on the way, and no coarser.
    assert 1e-12 < difference / norm < 1e-6
