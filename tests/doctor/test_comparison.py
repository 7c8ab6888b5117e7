"""Where two runs part: the first step, tensor and element."""

import contextlib
import dataclasses
import io
import json

import pytest
import torch

from shardwise.cli.main import main
from shardwise.core.errors import CheckpointError, ConfigError, DataError
from shardwise.core.sharding import ParamLayout, ParamShard
from shardwise.doctor.comparison import compare
from shardwise.run.metrics import MetricsWriter
from shardwise.storage import checkpoint
from shardwise.storage.checkpoint import comparing

STEPS = 4


@dataclasses.dataclass
class Run:
    """What a run leaves, in a folder."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    meta: dict[str, object] = dataclasses.field(default_factory=dict)

    def write(self, folder, group, *, ranks=1, steps=(2, 4)):
        """Split over so many ranks' shards."""
        folder.mkdir()
        with MetricsWriter(folder, 0) as metrics:
            for step, loss in enumerate(self.losses):
                metrics.write(step, {"loss": loss, "tokens_per_second": id(self) + step})
        for step in steps:
            state = {}
            for key, tensor in self.weights.items():
                layout = ParamLayout.split(tensor.shape, 0, ranks)
                for rank in range(ranks):
                    state[f"{key} {rank}"] = ParamShard(key, layout.take(tensor, rank), layout, rank)
            checkpoint.save(folder / "checkpoints", step, state, self.meta, group=group)
        return folder


def run():
    torch.manual_seed(0)
    weights = {"optimizer.exp_avg.weight": torch.randn(6, 4), "weight": torch.randn(6, 4), "z": torch.randn(4)}
    return Run([3.5 - step for step in range(STEPS)], weights)


def shown(one, other):
    """Whether the bits are the same, and the differences, without a judgement."""
    comparison = compare(one, other, rerun=False)
    assert comparison.verdict in ("same bits", "different")
    return comparison.is_sound, comparison.lines


def printed(*paths):
    """The exit code of the command, and the lines that it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            code = main(["compare", *map(str, paths), "--no-rerun"])
        except SystemExit as exit_:
            code = exit_.code
    return code, out.getvalue().splitlines()


@pytest.mark.ranks(1)
def test_the_same_bits_in_other_shards(group, tmp_path):
    one, other = run().write(tmp_path / "a", group), run().write(tmp_path / "b", group, ranks=2)
    expected = [
        "metrics of 4 steps: the same bits",
        "checkpoints of step 2: the same bits",
        "checkpoints of step 4: the same bits",
    ]
    assert shown(one, other) == (True, expected)
    newest = other / "checkpoints" / "step-00000004"
    assert shown(one, newest) == (True, expected[2:])
    assert printed(one, other) == (0, expected)


@pytest.mark.ranks(1)
def test_the_first_difference(group, tmp_path):
    one, changed = run(), run()
    changed.losses[2] += 0.5
    changed.losses[3] += 0.25
    changed.weights["weight"][4, 1:3] *= 2
    changed.weights["optimizer.exp_avg.weight"][0, 0] += 1
    changed.weights["z"] = changed.weights["z"].double()
    paths = [each.write(tmp_path / name, group, ranks=2) for name, each in (("a", one), ("b", changed))]
    same, lines = shown(*paths)
    assert not same
    value = float(one.weights["weight"][4, 1])
    distance = float(one.weights["weight"][4, 1:3].double().norm() / one.weights["weight"].double().norm())
    weight_line = (
        f"  weight[4, 1]: {value!r} and {2 * value!r}; 2 of 24 elements differ, relative distance {distance:.1e}"
    )
    assert lines[:4] == [
        "metrics differ from step 2 on: loss is 1.5 and 2.0",
        "  the largest distance is 5.0e-01, of loss at step 3",
        "checkpoints of step 2: 3 tensors differ",
        "  z is torch.float32 [4] and torch.float64 [4]",
    ]
    # The largest distance comes first.
    moment = float(1 / one.weights["optimizer.exp_avg.weight"].double().norm())
    assert [line == weight_line for line in lines[4:]] == [distance > moment, distance < moment]
    assert f"relative distance {moment:.1e}" in lines[4 if moment > distance else 5]
    assert len(lines) == 6, "later steps follow from the first"
    assert printed(*paths) == (1, lines)


@pytest.mark.ranks(1)
def test_bits_and_not_values(group, tmp_path):
    one, changed = run(), run()
    one.weights["z"][3] = 0.0
    changed.weights["z"][3] = -0.0
    same, lines = shown(one.write(tmp_path / "a", group), changed.write(tmp_path / "b", group))
    assert not same
    assert lines[-1] == "  z[3]: 0.0 and -0.0; 1 of 4 elements differ, relative distance 0.0e+00"


@pytest.mark.ranks(1)
def test_nothing_to_compare(group, tmp_path):
    one, other = run().write(tmp_path / "a", group, steps=(1,)), tmp_path / "empty"
    other.mkdir()
    with pytest.raises(ConfigError, match=r"have no step in common: checkpoints of steps \[1\] and none"):
        shown(one, other)
    with pytest.raises(ConfigError, match="is no folder; give the --out of a training run"):
        shown(one, tmp_path / "nowhere")


def write_rows(folder, rows, end="\n"):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps({"step": step, **row}) for step, row in rows) + end)
    return folder


ROWS = [(step, {"loss": 3.5 - step, "grad_norm": 1.5, "held_out_loss": 2.0, "mfu": 0.1}) for step in range(4)]


def test_steps_that_one_run_has_alone(tmp_path):
    one, other = write_rows(tmp_path / "a", ROWS[:3]), write_rows(tmp_path / "b", [*ROWS, (4, {"loss": 0.0})])
    expected = ["metrics of 3 steps: the same bits", f"only {other} has metrics of 2 steps, the first of them step 3"]
    assert shown(one, other) == shown(other, one) == (False, expected)
    assert printed(one, other) == (1, expected)


def test_results_that_one_run_has_alone(tmp_path):
    rows = [(step, dict(row)) for step, row in ROWS]
    del rows[1][1]["grad_norm"], rows[2][1]["grad_norm"], rows[3][1]["held_out_loss"], rows[0][1]["mfu"]
    one, other = write_rows(tmp_path / "a", ROWS), write_rows(tmp_path / "b", rows)
    assert shown(one, other) == (
        False,
        [f"only {one} has grad_norm of 2 steps, the first of them step 1", f"only {one} has held_out_loss of step 3"],
    )
    rows = [(step, row | {"tokens_per_second": step, "peak_resident_bytes": 7}) for step, row in ROWS]
    assert shown(one, write_rows(tmp_path / "c", rows)) == (True, ["metrics of 4 steps: the same bits"])


def test_bits_of_metrics(tmp_path):
    rows = [*ROWS[:2], (2, ROWS[2][1] | {"held_out_loss": -0.0})]
    zeros = [*ROWS[:2], (2, ROWS[2][1] | {"held_out_loss": 0.0})]
    same, lines = shown(write_rows(tmp_path / "a", zeros), write_rows(tmp_path / "b", rows))
    assert (same, lines) == (False, ["metrics differ from step 2 on: held_out_loss is 0.0 and -0.0"])


def test_lines_that_cannot_be_read(tmp_path):
    one, other = write_rows(tmp_path / "a", ROWS), write_rows(tmp_path / "b", ROWS, end='\n{"step": 4, "lo')
    path = other / "metrics.jsonl"
    note = f"note: the last line of {path} was cut"
    assert shown(one, other) == (True, [note, "metrics of 4 steps: the same bits"])
    lines = path.read_text().splitlines()
    for text, numbers in (
        ("\n".join([lines[0], lines[1][:9], *lines[2:4], ""]), r"\[2\]"),
        ("\n".join([lines[0], "{}", *lines[2:4], "no more\n"]), r"\[2, 5\]"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=rf"b.metrics\.jsonl has lines that cannot be read: {numbers}; "):
            shown(one, other)


@pytest.mark.ranks(1)
def test_what_is_kept_beside_tensors(group, tmp_path):
    one, changed = run(), run()
    one.meta = {"skipped_steps": 0, "loss_scale": {"scale": 2.0}, "settings": {"parallel": {"tp": 1}}, "sha": "a"}
    changed.meta = one.meta | {"skipped_steps": 1, "loss_scale": {"scale": 1.0}, "settings": {}}
    del changed.meta["sha"]
    same, lines = shown(one.write(tmp_path / "a", group), changed.write(tmp_path / "b", group, ranks=2))
    assert not same
    assert lines[1:] == [
        "checkpoints of step 2: contents other than tensors differ",
        "  skipped_steps is 0 and 1",
        '  loss_scale is {"scale": 2.0} and {"scale": 1.0}',
        '  sha is "a" and missing',
    ]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("most", [1, 2, 5, 12, 31])
def test_tensors_are_compared_in_pieces(group, tmp_path, monkeypatch, most):
    """Pieces of one element up to some rows, of tensors whose shards have their bounds elsewhere."""
    monkeypatch.setattr(comparing, "_MOST_ELEMENTS", most)
    shapes = {"a": (6, 5), "b": (4, 3, 2), "c": (30,), "d": (4, 0), "e": (4, 1)}
    one = Run([1.0], {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()})
    changed = Run([1.0], {name: tensor.clone() for name, tensor in one.weights.items()})
    changed.weights["a"][3:, 4] += 1
    changed.weights["b"][1, 2, 1] = changed.weights["b"][3, 0, 0] = 7
    folders = one.write(tmp_path / "a", group, steps=(1,)), changed.write(tmp_path / "b", group, ranks=2, steps=(1,))
    stored = [comparing.StoredCheckpoint(folder / "checkpoints" / "step-00000001") for folder in folders]
    found = {each.name: each for each in comparing.tensor_differences(*stored)}
    assert {name: (each.num_different, each.num_elements, each.first) for name, each in found.items()} == {
        "a": (3, 30, (3, 4)),
        "b": (2, 24, (1, 2, 1)),
    }
    for name, each in found.items():
        left, right = one.weights[name], changed.weights[name]
        assert each.values == (left[each.first].item(), right[each.first].item())
        assert each.distance == pytest.approx(float((left - right).norm() / left.norm()), rel=1e-12)
    for name, tensor in changed.weights.items():
        assert torch.equal(stored[1].read(name, [0] * tensor.dim(), tensor.shape), tensor)


@pytest.mark.ranks(1)
def test_a_damaged_checkpoint(group, tmp_path):
    one, other = run().write(tmp_path / "a", group), run().write(tmp_path / "b", group)
    (file,) = (other / "checkpoints" / "step-00000002").glob("*.safetensors")
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"I32"'))
    with pytest.raises(CheckpointError, match=r"has no .* of torch.float32 and shape \[6, 4\]"):
        shown(one, other)
