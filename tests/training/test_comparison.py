"""Where two runs part: the first step, tensor and element."""

import contextlib
import dataclasses
import io

import pytest
import torch

from shardwise import checkpoint
from shardwise.cli.main import main
from shardwise.errors import ConfigError
from shardwise.sharding import ParamLayout, ParamShard
from shardwise.training.comparison import compare_runs
from shardwise.training.metrics import MetricsWriter

STEPS = 4


@dataclasses.dataclass
class Run:
    """What a run leaves, in a folder."""

    losses: list[float]
    weights: dict[str, torch.Tensor]

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
            checkpoint.save(folder / "checkpoints", step, state, group=group)
        return folder


def run():
    torch.manual_seed(0)
    weights = {"optimizer.exp_avg.weight": torch.randn(6, 4), "weight": torch.randn(6, 4), "z": torch.randn(4)}
    return Run([3.5 - step for step in range(STEPS)], weights)


def printed(*paths):
    """The exit code of the command, and the lines that it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            code = main(["compare", *map(str, paths)])
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
    assert compare_runs(one, other) == (True, expected)
    newest = other / "checkpoints" / "step-00000004"
    assert compare_runs(one, newest) == (True, expected[2:])
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
    same, lines = compare_runs(*paths)
    assert not same
    value = float(one.weights["weight"][4, 1])
    distance = float(one.weights["weight"][4, 1:3].double().norm() / one.weights["weight"].double().norm())
    assert lines[:4] == [
        "metrics differ from step 2 on: loss is 1.5 and 2.0",
        "  the largest distance is 5.0e-01, of loss at step 3",
        "checkpoints of step 2: 3 tensors differ",
        f"  weight[4, 1]: {value!r} and {2 * value!r}; 2 of 24 elements differ, relative distance {distance:.1e}",
    ]
    assert lines[4] == "  z is torch.float32 [4] and torch.float64 [4]"
    assert lines[5].startswith("  optimizer.exp_avg.weight[0, 0]: ")
    assert len(lines) == 6, "later steps follow from the first"
    assert printed(*paths) == (1, lines)


@pytest.mark.ranks(1)
def test_bits_and_not_values(group, tmp_path):
    one, changed = run(), run()
    one.weights["z"][3] = 0.0
    changed.weights["z"][3] = -0.0
    same, lines = compare_runs(one.write(tmp_path / "a", group), changed.write(tmp_path / "b", group))
    assert not same
    assert lines[-1] == "  z[3]: 0.0 and -0.0; 1 of 4 elements differ, relative distance 0.0e+00"


@pytest.mark.ranks(1)
def test_nothing_to_compare(group, tmp_path):
    one, other = run().write(tmp_path / "a", group, steps=(1,)), tmp_path / "empty"
    other.mkdir()
    with pytest.raises(ConfigError, match=r"have no step in common: checkpoints of steps \[1\] and none"):
        compare_runs(one, other)
    with pytest.raises(ConfigError, match="is no folder; give the --out of a training run"):
        compare_runs(one, tmp_path / "nowhere")
