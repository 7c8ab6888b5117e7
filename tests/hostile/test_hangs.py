"""Ranks that stop in the middle: the others say whom they wait for, and end in time; and ranks that only take long."""

import os
import signal

import pytest
from harness.program import Program
from training.tiny import tiny_settings

TINY = ["--model.num-layers", "2", "--model.hidden-size", "32", "--model.num-heads", "4", "--model.vocab-size", "301"]
TINY += ["--model.sequence-length", "24", "--training.global-batch-size", "4", "--device", "cpu"]
LIMIT = 6


def rank_of(pid):
    with open(f"/proc/{pid}/environ", "rb") as file:
        variables = dict(item.partition(b"=")[::2] for item in file.read().split(b"\0"))
    return int(variables.get(b"RANK", b"-1"))


@pytest.mark.parametrize(
    ("split", "shared_memory", "place"),
    [
        ("--parallel.tp", "1", "all_reduce of (layer [a-z_.0-9]+|the backward pass)"),
        pytest.param("--parallel.pp", "0", "(receive|send|all_reduce|an exchange of .*)", marks=pytest.mark.slow),
    ],
)
def test_a_stopped_rank_is_named_and_every_rank_ends(tmp_path, split, shared_memory, place):
    tiny_settings(tmp_path)  # writes the text
    metrics = tmp_path / "run" / "metrics.jsonl"
    told = ["--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "run"), *TINY, split, "2"]
    told += ["--training.steps", "1000000", "--timeout", str(LIMIT)]
    variables = {"SHARDWISE_CACHE": tmp_path / "cache", "SHARDWISE_SHARED_MEMORY": shared_memory}
    with Program("-m", "shardwise", "train", *told, **variables) as run:
        run.wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 3, "three steps are done")
        (stopped,) = [pid for pid in run.children() if rank_of(pid) == 1]
        os.kill(stopped, signal.SIGSTOP)
        run.wait_for_line(rf"train: rank 0: waiting for rank 1 for \d s, in {place}")
        line = run.wait_for_line(
            rf"error: rank 0: waiting for rank 1 for (\d+) s, in {place}.*, at step \d+; no sign of life for \d+ s"
        )
        assert LIMIT <= int(line[1]) < 10 * LIMIT
        # One that is stopped hears no signal but SIGKILL, and has ended all the same.
        run.finish(exit_code=1)


PREPARING = """
import os, signal, sys, time
from shardwise.cli.reporting import run_command
from shardwise.collectives.agreement import agree
from shardwise.training.ranks import open_ranks

def prepare(rank):
    if rank == 1 and sys.argv[1] == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 0 and sys.argv[1] == "works":
        time.sleep(2.5 * {limit})

def body():
    with open_ranks("cpu", timeout={limit}) as ranks:
        with ranks.phase("reading the text"):
            agree(lambda: prepare(ranks.rank), group=ranks.control)
        print(f"rank {{ranks.rank}} goes on", flush=True)

sys.exit(run_command("shardwise train", body))
"""


@pytest.mark.parametrize("what", ["works", "stops"])
def test_preparing_may_take_longer_than_the_limit_but_not_without_a_sign_of_life(tmp_path, what):
    program = tmp_path / "program.py"
    program.write_text(PREPARING.format(limit=3))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with Program(*launch, str(program), what) as run:
        if what == "works":
            run.wait_for_line(r"train: rank 1: waiting for rank 0 for \d s, in an exchange of .*, reading the text")
            run.finish()
            assert sorted(run.stdout.splitlines()) == ["rank 0 goes on", "rank 1 goes on"]
            assert "error" not in run.stderr
        else:
            line = run.wait_for_line(
                r"error: (?:rank 0: )?waiting for rank 1 for (\d+) s, in an exchange of .*, reading the text; no sign"
            )
            assert 3 <= int(line[1]) < 30
            run.finish(exit_code=1)
            assert "goes on" not in run.stdout
