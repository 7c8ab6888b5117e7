"""Ranks that stop in the middle: the others say whom they wait for, and end in time; and ranks that only take long."""

import pytest
from harness.program import Program
from training.stopped import check_stopped_rank_is_named


def test_a_stopped_rank_is_named_and_every_rank_ends(tmp_path):
    check_stopped_rank_is_named(
        tmp_path, "--parallel.tp", "2", place="all_reduce (of (layer [a-z_.0-9]+|the backward pass) )?"
    )


PREPARING = """
import os, signal, sys, time
from shardwise.cli.reporting import run_command
from shardwise.communication.agreement import agree
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
            run.wait_for_line(r"train: rank 1: waiting for rank 0 for \d+ s, in an exchange of .*, reading the text")
            run.finish()
            assert sorted(run.stdout.splitlines()) == ["rank 0 goes on", "rank 1 goes on"]
            assert "error" not in run.stderr
        else:
            line = run.wait_for_line(
                r"error: (?:rank 0: )?waiting for rank 1 for (\d+) s, in an exchange of .*, reading the text; no sign"
            )
            assert int(line[1]) >= 3
            run.finish(exit_code=1)
            assert "goes on" not in run.stdout
