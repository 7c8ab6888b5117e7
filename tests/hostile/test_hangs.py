"""Ranks that stop in the middle: the others say whom they wait for, and end in time; and ranks that only take long."""

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

LIMIT = 3

def work():
    time.sleep(2.5 * LIMIT)
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)

def body():
    with open_ranks("cpu", timeout=LIMIT) as ranks:
        with ranks.phase("reading the text"):
            agree(lambda: work() if ranks.rank == 0 else None, group=ranks.control)
        print(f"rank {ranks.rank} goes on", flush=True)
        with ranks.phase("training a tokenizer"):
            agree(lambda: os.kill(os.getpid(), signal.SIGSTOP) if ranks.rank == 1 else None, group=ranks.control)
        print(f"rank {ranks.rank} is done", flush=True)

sys.exit(run_command("shardwise train", body))
"""


def test_preparing_may_take_longer_than_the_limit_but_not_without_a_sign_of_life(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PREPARING)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with Program(*launch, str(program), str(tmp_path / "said")) as run:
        # Rank 0 is at work, for longer than the limit.
        run.wait_for_line(r"train: rank 1: waiting for rank 0 for \d+ s, in an exchange of .*, reading the text")
        (tmp_path / "said").touch()
        run.wait_until(lambda: run.stdout.count(" goes on\n") == 2, "both ranks go on")
        assert "error" not in run.stderr
        # Rank 1 is stopped.
        line = run.wait_for_line(
            r"error: (?:rank 0: )?waiting for rank 1 for (\d+) s, in an exchange of .*, training a tokenizer; no sign"
        )
        assert int(line[1]) >= 3
        run.finish(exit_code=1)
        assert "is done" not in run.stdout
