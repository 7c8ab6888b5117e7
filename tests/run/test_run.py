"""A run stopped and resumed is the run; what does not belong to it is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from run.tiny import tiny_settings

from shardwise.core.errors import (
    CheckpointError,
    ConfigError,
    DivergenceError,
    ParityError,
    ShardwiseError,
    UnwritableError,
)
from shardwise.nn import linear
from shardwise.run.checkpoint_writer import compressed_bits_per_byte
from shardwise.run.checkpoints import begin_save, start_or_resume
from shardwise.run.exact.parity import check_exact_parity
from shardwise.run.metrics import MetricsWriter, read_metrics
from shardwise.run.parity import check_parity
from shardwise.run.processes.ranks import Ranks
from shardwise.run.run import train
from shardwise.run.session import open_session
from shardwise.run.tasks.task import Session
from shardwise.storage import checkpoint


def open_tiny(settings, monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    ranks = Ranks(dist.get_rank(), dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    return open_session(settings, ranks)


def interrupted_at(last: int, session: Session) -> None:
    """Train until ``last`` is about to begin, and end as by Ctrl-C."""
    original = session.trainer.train_step

    def train_step(step, loader, *hooks):
        if step == last:
            raise KeyboardInterrupt
        return original(step, loader, *hooks)

    session.trainer.train_step = train_step
    with pytest.raises(KeyboardInterrupt):
        train(session)


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl")]


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_resumed_run_is_bit_equal(group, tmp_path, monkeypatch, sequence_parallel):
    options = {"tp": 2, "sequence_parallel": sequence_parallel, "save_every": 3, "model": {"dropout": 0.1}}
    options["asynchronous_saves"] = False
    whole = tiny_settings(tmp_path, **options)
    session = open_tiny(dataclasses.replace(whole, out=str(tmp_path / "whole")), monkeypatch, tmp_path)
    uninterrupted = train(session)

    broken = open_tiny(dataclasses.replace(whole, out=str(tmp_path / "broken")), monkeypatch, tmp_path)
    interrupted_at(5, broken)
    dist.barrier(group=group)

    again = dataclasses.replace(whole, out=str(tmp_path / "broken"), resume="auto")
    resumed = train(open_tiny(again, monkeypatch, tmp_path))
    assert resumed.held_out_bits_per_byte == uninterrupted.held_out_bits_per_byte
    dist.barrier(group=group)
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "broken")) == 8
    first = checkpoint.read_meta(tmp_path / "whole" / "checkpoints" / "step-00000008")
    assert first["settings"]["training"]["steps"] == 8
    # Nothing is left to do: the run is measured again and stays as it is.
    done = train(open_tiny(again, monkeypatch, tmp_path))
    assert done.first_loss is None
    assert done.held_out_bits_per_byte == uninterrupted.held_out_bits_per_byte


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_what_does_not_belong_is_refused_on_every_rank(group, tmp_path, monkeypatch):
    train(open_tiny(tiny_settings(tmp_path, tp=2, steps=2), monkeypatch, tmp_path))
    before = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())

    with pytest.raises(ConfigError, match="--resume auto"):
        train(open_tiny(tiny_settings(tmp_path, tp=2, steps=2), monkeypatch, tmp_path))
    other = tiny_settings(tmp_path, tp=2, steps=2, resume="auto", model={"num_layers": 3})
    with pytest.raises(CheckpointError, match=r"model\.num_layers was 2 and is 3"):
        train(open_tiny(other, monkeypatch, tmp_path))
    other = tiny_settings(tmp_path, tp=2, steps=2, resume="auto", seed=5)
    with pytest.raises(CheckpointError, match=r"training\.seed was 1234 and is 5"):
        train(open_tiny(other, monkeypatch, tmp_path))
    other = tiny_settings(tmp_path, tp=2, steps=2, resume="auto")
    other = dataclasses.replace(other, corpus=dataclasses.replace(other.corpus, held_out_fraction=0.3))
    with pytest.raises(CheckpointError, match=r"held-out data was 'corpus\.held-out-fraction 0\..*0\.3'"):
        train(open_tiny(other, monkeypatch, tmp_path))
    same = open_tiny(tiny_settings(tmp_path, tp=2, steps=2, resume="auto"), monkeypatch, tmp_path)
    other = dataclasses.replace(same, data=dataclasses.replace(same.data, held_out_sha256="of another file"))
    with pytest.raises(CheckpointError, match=r"held_out_sha256 was '[0-9a-f]{64}' and is 'of another file'"):
        train(other)
    with pytest.raises(ConfigError, match=r"2 steps already, more than training\.steps 1"):
        train(open_tiny(tiny_settings(tmp_path, tp=2, steps=1, resume="auto"), monkeypatch, tmp_path))
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == before
    dist.barrier(group=group)

    newest = tmp_path / "run" / "checkpoints" / before[-1]
    damaged = newest / "rank-00000.safetensors"
    if dist.get_rank(group) == 0:
        damaged.write_bytes(damaged.read_bytes()[:-7])
    dist.barrier(group=group)
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors"):
        train(open_tiny(tiny_settings(tmp_path, tp=2, steps=2, resume="auto"), monkeypatch, tmp_path))

    restarted = train(open_tiny(tiny_settings(tmp_path, tp=2, steps=2, resume="restart"), monkeypatch, tmp_path))
    assert restarted.first_loss is not None


def test_a_refused_run_leaves_the_folder_as_it_was(tmp_path, monkeypatch):
    from shardwise.run.run import run

    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    run(tiny_settings(tmp_path, steps=1))
    out = tmp_path / "run"
    # The name of a temporary file of another program.
    (out / ".mine.tmp").write_text("mine")
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    with pytest.raises(ConfigError, match=r"has a checkpoint already \(step-00000001\)"):
        run(tiny_settings(tmp_path, steps=2, model={"vocab_size": 270}))
    with pytest.raises(CheckpointError, match="num_layers was 2 and is 1"):
        run(tiny_settings(tmp_path, steps=2, resume="auto", model={"num_layers": 1}))
    # Before the text is read, which takes a while.
    with pytest.raises(ConfigError, match="has a checkpoint already"):
        run(dataclasses.replace(tiny_settings(tmp_path), data=(str(tmp_path / "missing"),)))
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.ranks(1)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_rule_of_random_numbers_is_part_of_a_run_with_dropout(group, tmp_path, monkeypatch, dropout):
    options = {"model": {"dropout": dropout}, "steps": 1, "resume": "auto"}
    train(open_tiny(tiny_settings(tmp_path, **options), monkeypatch, tmp_path))
    resumed = open_tiny(tiny_settings(tmp_path, rng="per_rank", **options), monkeypatch, tmp_path)
    if dropout:
        with pytest.raises(CheckpointError, match=r"training\.rng was 'global' and is 'per_rank'"):
            train(resumed)
    else:
        assert train(resumed).first_loss is None


@pytest.mark.ranks(1)
def test_an_exact_run_goes_on_as_what_it_is(group, tmp_path, monkeypatch):
    plain = dataclasses.replace(tiny_settings(tmp_path, dtype="float32"), resume="auto")
    # Only what is saved and read is exact here: the model need not be.
    session = open_tiny(plain, monkeypatch, tmp_path)

    def with_parts(parts, **training):
        parallel = dataclasses.replace(plain.parallel, exact=True, exact_parts=parts)
        return dataclasses.replace(with_training(**training), parallel=parallel)

    def with_training(**training):
        return dataclasses.replace(plain, training=dataclasses.replace(plain.training, **training))

    def save(step, settings):
        begin_save(dataclasses.replace(session, settings=settings), step).complete()

    def go_on(settings):
        return start_or_resume(dataclasses.replace(session, settings=settings))[0]

    save(1, with_parts(2))
    assert go_on(with_parts(2)) == go_on(with_parts(2, micro_batch_size=2)) == 1
    for other, message in (
        (plain, "--exact was True and is False"),
        (with_parts(1), "--exact-parts was 2 and is 1; --training.micro-batch-size was 2 and is 4"),
        (with_parts(2, micro_batch_size=1), "--training.micro-batch-size was 2 and is 1"),
        (with_parts(2, dtype="float64"), "--training.dtype was 'float32' and is 'float64'"),
    ):
        with pytest.raises(CheckpointError, match=f"is of another run: {message}; use the same settings and data, or"):
            go_on(other)
    save(2, plain)
    with pytest.raises(CheckpointError, match="is of another run: --exact was False and is True; use"):
        go_on(with_parts(2))
    assert go_on(with_training(micro_batch_size=1, dtype="float64")) == 2, "plain runs may change it"


@pytest.mark.ranks(2)
def test_divergence_names_the_step(group, tmp_path, monkeypatch):
    settings = tiny_settings(
        tmp_path, tp=2, optimizer={"learning_rate": 1e30, "warmup_steps": 0, "clip_grad_norm": 0.0}
    )
    with pytest.raises(DivergenceError, match=r"the (loss|norm of the gradient) is (nan|inf) at step \d"):
        train(open_tiny(settings, monkeypatch, tmp_path))
    session = open_tiny(dataclasses.replace(settings, out=str(tmp_path / "broken")), monkeypatch, tmp_path)
    next(session.trainer.model.parameters()).data.fill_(torch.nan)
    with pytest.raises(
        DivergenceError, match=r"no step was made .*; if good weights fail .* the mistake is Shardwise's"
    ):
        train(session)


@pytest.mark.sample(2)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("architecture", ["llama", pytest.param("gpt", marks=pytest.mark.slow)])
@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.slow), True])
def test_parity_holds_and_would_not_if_a_collective_were_missing(
    group, tmp_path, monkeypatch, architecture, sequence_parallel
):
    settings = tiny_settings(tmp_path, tp=2, sequence_parallel=sequence_parallel, model={"architecture": architecture})
    session = open_tiny(settings, monkeypatch, tmp_path)
    # Into more parts the sizes of this model cannot be cut.
    settings = dataclasses.replace(settings, parallel=dataclasses.replace(settings.parallel, exact_parts=2))
    session = dataclasses.replace(session, settings=settings)
    before = [param.detach().clone() for param in session.trainer.model.parameters()]
    parity = check_parity(session)
    assert "tp=2 equals tp=1" in parity.line()
    assert check_exact_parity(session).line().endswith("loss 0 apart, gradient norm 0, updated weights 0")
    for param, earlier in zip(session.trainer.model.parameters(), before, strict=True):
        assert torch.equal(param, earlier)

    def wrong(tensor, **_):
        return linear.Pending(None, lambda: tensor)

    def wrong_half(tensor, *, group, dim, **_):
        return linear.Pending(None, lambda: tensor.chunk(2, dim)[group.rank()].contiguous())

    # Lose the sum of the input gradients.
    monkeypatch.setattr(linear, "all_reduce_async", wrong)
    monkeypatch.setattr(linear, "reduce_scatter_async", wrong_half)
    with pytest.raises(ParityError, match="more than rounding explains"):
        check_parity(session)
    with pytest.raises(ParityError, match="exact runs must have the same bits"):
        check_exact_parity(session)


def test_metrics_drop_steps_that_are_done_again(tmp_path):
    with MetricsWriter(tmp_path, 0) as metrics:
        for step in range(4):
            metrics.write(step, {"loss": 1.0 / (step + 1)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    with (tmp_path / "metrics.jsonl").open() as before, MetricsWriter(tmp_path, 2) as metrics:
        metrics.write(2, {"loss": 9.0})
        # It was replaced, not emptied: a run that is killed between the two has lost nothing.
        assert len(before.readlines()) == 5
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(0, 1.0), (1, 0.5), (2, 9.0)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("write", [0, 1])
@pytest.mark.parametrize("is_stopped", [False, True])
def test_metrics_that_cannot_be_written_end_all_ranks(group, tmp_path, monkeypatch, write, is_stopped):
    """In the middle of a run, and after its last step; also of a run that a signal ends there."""
    session = open_tiny(tiny_settings(tmp_path, steps=2), monkeypatch, tmp_path)
    written = MetricsWriter.write

    def fail_once(metrics, step, values):
        if step == write:
            if is_stopped:
                os.kill(os.getpid(), signal.SIGTERM)
            raise UnwritableError("cannot write the metrics: No space left on device")
        written(metrics, step, values)

    monkeypatch.setattr(MetricsWriter, "write", fail_once)
    with pytest.raises(UnwritableError, match="No space left on device"):
        train(session)


@pytest.mark.ranks(2)
def test_metrics_that_cannot_be_begun_end_all_ranks(group, tmp_path, monkeypatch):
    session = open_tiny(tiny_settings(tmp_path, steps=1), monkeypatch, tmp_path)
    (tmp_path / "run" / "metrics.jsonl").mkdir(parents=True, exist_ok=True)
    with pytest.raises(ShardwiseError, match=r"metrics\.jsonl"):
        train(session)


def test_a_full_disk_is_an_error_of_the_metrics(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with MetricsWriter(tmp_path / "run", 0) as metrics:
        metrics._file.close()
        metrics._file = (tmp_path / "metrics.jsonl").open("w")
        with pytest.raises(UnwritableError, match=r"metrics\.jsonl': No space left on device; free the disk"):
            metrics.write(0, {"loss": 1.0})


def test_metrics_that_cannot_be_read_are_dropped_aloud(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n\0\0\n{"step": 1}\n[]\n{"step": 2, "lo')
    MetricsWriter(tmp_path, 2).__exit__()
    assert [row["step"] for row in read_metrics(path)] == [0, 1]
    assert capsys.readouterr().out == f"note   {path} has lines that cannot be read, which are dropped: 2, 4\n"


def test_compressors_are_measured_in_bits_per_byte():
    noise = bytes(range(256)) * 4
    measured = compressed_bits_per_byte(noise)
    assert set(measured) == {"zlib -9", "lzma"}
    assert 0 < measured["zlib -9"] < 8.2
    assert compressed_bits_per_byte(b"") == {}


def test_files_of_a_run(tmp_path, monkeypatch):
    """Alone, without a launcher: the files that the README names are there."""
    from shardwise.run.run import run

    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    run(tiny_settings(tmp_path, steps=3, eval_every=2))
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {
        "checkpoints",
        "loss.png",
        "metrics.jsonl",
        "sample.txt",
        "settings.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [("held_out_bits_per_byte" in row) for row in rows] == [False, True, True]


def test_a_run_evaluates_after_each_tenth_on_few_samples_and_at_its_end_on_all(tmp_path, monkeypatch):
    from shardwise.run.run import run
    from shardwise.training.trainer import Trainer

    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    evaluate, sizes = Trainer.evaluate, []
    monkeypatch.setattr(
        Trainer, "evaluate", lambda own, held_out: sizes.append(len(held_out)) or evaluate(own, held_out)
    )
    run(tiny_settings(tmp_path, steps=20, eval_every=None))
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] + 1 for row in rows if "held_out_bits_per_byte" in row] == list(range(2, 21, 2))
    *few, last = sizes
    assert set(few) == {4}, "a batch"
    assert last > 40
    held_out = [row["held_out_bits_per_byte"] for row in rows if "held_out_bits_per_byte" in row]
    assert all(0.5 < value / row["bits_per_byte"] < 2 for value, row in zip(held_out, rows[1::2], strict=True))


def test_copies_of_parameters_are_compared_every_few_steps(tmp_path, monkeypatch):
    from shardwise.run.run import run
    from shardwise.training.trainer import Trainer

    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    compared: list[int] = []
    monkeypatch.setattr(Trainer, "check_copies", lambda self, done: compared.append(done))
    run(tiny_settings(tmp_path, steps=5, doctor_every=2))
    assert compared == [2, 4]
