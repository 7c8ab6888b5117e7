"""Two hosts: one that cannot be reached any more, and hosts told different things.

Hosts whose own names are loopback addresses train in ``examples/test_launch_scripts.py``.
"""

import contextlib
import re

from harness.hosts import ADDRESSES, NAMES, two_hosts
from run.run_processes import run_commands
from run.stopped import LIMIT
from run.tiny import tiny_settings

PORT = 29500
TINY = ["--model.num-layers", "2", "--model.hidden-size", "32", "--model.num-heads", "4", "--model.vocab-size", "301"]
TINY += ["--model.sequence-length", "24", "--training.global-batch-size", "4", "--device", "cpu", "--parallel.tp", "2"]


def settings(folder):
    tiny_settings(folder)  # writes the text
    return ["--data", str(folder / "text.txt"), "--out", str(folder / "run"), *TINY]


def train(folder, node, master, *more, program, **variables):
    """Start one host's half of a run of two ranks."""
    launch = ["-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1"]
    launch += ["--master-addr", master, "--master-port", str(PORT), "-m", "shardwise", "train"]
    told = [*settings(folder), *more]
    # The picture takes as long as the steps.
    variables |= {"OMP_NUM_THREADS": "1", "TEST_WITHOUT_MODULES": "matplotlib"}
    return program(*launch, *told, SHARDWISE_CACHE=folder / "cache", **variables)


def steps(folder):
    path = folder / "run" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_a_cut_link_ends_both_hosts_with_who_waits_for_whom(tmp_path):
    with two_hosts(tmp_path) as hosts, contextlib.ExitStack() as stack:
        told = ["--training.steps", "1000000", "--timeout", str(LIMIT)]
        runs = [
            stack.enter_context(train(tmp_path, node, ADDRESSES[0], *told, program=host.program))
            for node, host in enumerate(hosts)
        ]
        runs[0].wait_until(lambda: steps(tmp_path) >= 3, "three steps are done")
        hosts[0].cut()
        for node, run in enumerate(runs):
            other = f"rank {1 - node} on {NAMES[1 - node]}"
            line = run.wait_for_line(rf"error: (rank \d: )?waiting for {other} for (\d+) s, in (.*), at step \d+; (.*)")
            # Measured by the rank itself, which a busy machine may let look late.
            assert int(line[2]) >= LIMIT
            # The link may be cut in any of a step's collectives.
            assert line[3].startswith(("all_reduce", "all_gather", "reduce_scatter"))
            why = r"no sign of life" if node == 0 else "the launcher's store has not answered"
            assert line[4].startswith(why)
            run.finish(exit_code=1)


def test_hosts_that_were_told_different_sizes_hear_of_it(tmp_path):
    """gloo ends a process by SIGABRT when it is sent more than it expects, or sums what does not belong together."""
    argvs = [
        ["train", *settings(tmp_path), "--training.steps", "2", "--model.hidden-size", size] for size in ("32", "48")
    ]
    for code, _, error in run_commands(tmp_path, argvs, SHARDWISE_SHARED_MEMORY=0):
        assert code == 1
        assert re.search(
            r"error: parameter '.*' and \d+ more: of shape \[32\] on rank 0 and of shape \[48\] on rank 1, and ", error
        )
