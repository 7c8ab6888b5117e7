"""Ranks that stop in the middle: the others say whom they wait for, and end in time; and ranks that only take long."""

import pytest
from harness.program import Program
from run.stopped import LIMIT, check_stopped_rank_is_named


@pytest.mark.usefixtures("preparing")
def test_a_stopped_rank_is_named_and_every_rank_ends(tmp_path):
    place = "(all_reduce|all_gather) (of ([A-Za-z]+|layer [a-z_.0-9]+|the backward pass) )?"
    check_stopped_rank_is_named(tmp_path, "--parallel.tp", "2", place=place)


PREPARING = """
import os, signal, sys, time
from shardwise.cli.reporting import run_command
from shardwise.core.communication.agreement import agree
from shardwise.run.processes.ranks import open_ranks

LIMIT = {limit}

def work():
    time.sleep(1.2 * LIMIT)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)

def body():
    with open_ranks("cpu", timeout=LIMIT) as ranks:
        with ranks.phase("reading the text"):
            agree(lambda: work() if ranks.rank == 0 else None, group=ranks.control)
        print(f"rank {{ranks.rank}} goes on", flush=True)
        with ranks.phase("training a tokenizer"):
            agree(lambda: os.kill(os.getpid(), signal.SIGSTOP) if ranks.rank == 1 else None, group=ranks.control)
        # Rank 1 is woken, to be ended; nobody gets to the end of the program meanwhile.
        time.sleep(1000)

sys.exit(run_command("shardwise train", body))
"""


@pytest.fixture(scope="module")
def preparing(tmp_path_factory):
    """The program, started before the first test, since it waits most of the time; and a file that it waits for."""
    folder = tmp_path_factory.mktemp("preparing")
    (folder / "program.py").write_text(PREPARING.format(limit=LIMIT))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with Program(*launch, folder / "program.py", folder / "said") as run:
        yield run, folder / "said"


def test_preparing_may_take_longer_than_the_limit_but_not_without_a_sign_of_life(preparing):
    run, said = preparing
    # Rank 0 is at work, for longer than the limit.
    run.wait_for_line(r"train: rank 1: waiting for rank 0 for \d+ s, in an exchange of .*, reading the text")
    said.touch()
    # An error ends the rank that it is told by, so there was none.
    run.wait_until(lambda: run.stdout.count(" goes on\n") == 2, "both ranks go on")
    # Rank 1 is stopped.
    line = run.wait_for_line(
        r"error: (?:rank 0: )?waiting for rank 1 for (\d+) s, in an exchange of .*, training a tokenizer; no sign"
    )
    assert int(line[1]) >= LIMIT
    run.finish(exit_code=1)
