"""The launches of docs/first-gpu.md, as far as they go without GPUs, schedulers and hosts."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import sys
from pathlib import Path

import pytest
import yaml
from harness.hosts import NAMES, two_hosts
from harness.program import Program
from run.tiny import tiny_settings
from torch.distributed.run import get_args_parser

from shardwise.cli.arguments import parse_command
from shardwise.cli.training import TrainArguments

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/first-gpu.md").read_text()
LAUNCH = ROOT / "examples/launch"
TINY = ["--model.num-layers", "2", "--model.hidden-size", "32", "--model.num-heads", "4", "--model.vocab-size", "301"]
TINY += ["--model.sequence-length", "24", "--training.global-batch-size", "4", "--training.steps", "2"]
TINY += ["--device", "cpu", "--parallel.tp", "2"]


def commands():
    """The indented lines of the page."""
    return [line.strip() for line in PAGE.splitlines() if line.startswith("    ")]


def own_variables(folder, *, python=sys.executable):
    tiny_settings(folder)  # writes the text
    # The picture takes as long as the steps.
    quick = {"OMP_NUM_THREADS": "1", "TEST_WITHOUT_MODULES": "matplotlib"}
    return {"PYTHON": str(python), "SHARDWISE_CACHE": folder / "cache", **quick}


class Recorder:
    """A Python that starts nothing: it leaves its arguments, those of ``torch.distributed.run``, in a file per host."""

    def __init__(self, folder):
        self.folder, self.path = folder, folder / "python"
        self.path.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {folder}/"arguments-$NODE_RANK"\n')
        self.path.chmod(0o755)

    def check(self, *, port, out):
        """Both hosts start one rank each of a run that trains into ``out``."""
        for rank in range(2):
            module, program, *words = (self.folder / f"arguments-{rank}").read_text().splitlines()
            assert (module, program) == ("-m", "torch.distributed.run")
            launched = get_args_parser().parse_args(words)
            assert (launched.nnodes, launched.node_rank, launched.nproc_per_node) == ("2", rank, "1")
            assert (launched.master_addr, launched.master_port) == ("127.0.0.1", int(port))
            assert (launched.module, launched.training_script) == (True, "shardwise")
            command, *flags = launched.training_script_args
            assert command == "train"
            settings = parse_command(TrainArguments, flags, "shardwise train").settings
            assert (settings.out, settings.parallel.tp, settings.training.steps) == (str(out), 2, 2)
            assert (settings.resume, settings.data) == ("auto", (str(self.folder / "text.txt"),))
            settings.check_world(2)


STARTS_RANKS = pytest.mark.parametrize(
    "starts_ranks", [False, pytest.param(True, marks=[pytest.mark.slow, pytest.mark.matrix])]
)
"""Whether ranks train; what they are told is compared in any case with what ``host.sh`` is told, whose ranks train."""


def steps(folder):
    return len((folder / "metrics.jsonl").read_text().splitlines())


def free_port():
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        return str(server.getsockname()[1])


def test_the_settings_of_the_page_are_settings():
    trains = [shlex.split(line)[2:] for line in commands() if line.startswith("shardwise train")]
    trains += [line.split("host.sh ")[1].split() for line in commands() if "host.sh " in line]
    assert len(trains) == 7
    for told in trains:
        parse_command(TrainArguments, told, "shardwise train")


def test_files_that_the_page_names_are_there():
    named = set(re.findall(r"examples/launch/[\w.]+|benchmarks/gpu\.py", PAGE))
    assert {Path(name).name for name in named} == {"host.sh", "train.sbatch", "kubernetes.yaml", "gpu.py"}
    for name in named:
        assert (ROOT / name).exists()
    for target in re.findall(r"\]\(([\w.]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists()


@pytest.mark.slow
def test_one_command_on_each_of_two_hosts(tmp_path):
    """As the page has it, but for the number of GPUs: names, a shared folder, the interface that is found."""
    lines = [line for line in commands() if "host.sh" in line]
    assert len(lines) == 2
    with two_hosts(tmp_path) as hosts, contextlib.ExitStack() as stack:
        runs = []
        for line, host in zip(lines, hosts, strict=True):
            words = shlex.split(line)
            variables = dict(word.split("=") for word in words if re.fullmatch(r"[A-Z_]+=\w+", word))
            assert variables["MASTER"] == NAMES[0]
            variables |= {"GPUS": "1", **own_variables(tmp_path)}
            told = [str(LAUNCH / "host.sh"), "--data", tmp_path / "text.txt", "--out", tmp_path / "run", *TINY]
            inside = host.inside("env", "SHARDWISE_SHARED_MEMORY=0", "RES_OPTIONS=timeout:1 attempts:1")
            runs.append(stack.enter_context(Program(*inside, *told, **variables)))
        for run in runs:
            run.finish()
    assert steps(tmp_path / "run") == 2


@STARTS_RANKS
def test_the_job_of_slurm(tmp_path, starts_ranks):
    """With an srun that starts each host's task here, and a scontrol that knows one name."""
    tools = tmp_path / "tools"
    tools.mkdir()
    each = 'for node in 0 1; do SLURM_NODEID=$node "$@" & done; wait %1 && wait %2\n'
    for name, text in (("srun", f"#!/bin/bash\nset -m\nshift\n{each}"), ("scontrol", "#!/bin/sh\necho 127.0.0.1\n")):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    slurm = {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "a[1-2]", "SLURM_JOB_ID": "7", "PORT": free_port()}
    slurm |= {"SLURM_JOB_NAME": "mine", "SLURM_SUBMIT_DIR": str(ROOT), "GPUS": "1", "OUT": str(tmp_path / "run")}
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    told = [LAUNCH / "train.sbatch", "--data", tmp_path / "text.txt", *TINY]
    recorder = Recorder(tmp_path)
    own = own_variables(tmp_path, **({} if starts_ranks else {"python": recorder.path}))
    with Program("bash", *told, PATH=path, **slurm, **own) as job:
        job.finish()
    if starts_ranks:
        assert steps(tmp_path / "run") == 2
    else:
        recorder.check(port=slurm["PORT"], out=tmp_path / "run")


@STARTS_RANKS
def test_the_pods_of_kubernetes(tmp_path, starts_ranks):
    """Both pods' command and arguments, run here, with /shared elsewhere and a name that this machine has."""
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    pod, spec = job["spec"]["template"]["spec"], job["spec"]
    (container,) = pod["containers"]
    given = {entry["name"]: entry["value"] for entry in container["env"]}
    name = job["metadata"]["name"]
    assert given["MASTER"] == f"{name}-0.{pod['subdomain']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert spec["completions"] == spec["parallelism"] == int(given["NODES"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(given["GPUS"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    told = [word.replace("/shared/texts", str(tmp_path / "text.txt")) for word in container["args"]]
    told = [word.replace("/shared", str(tmp_path)) for word in told]
    # Two ranks in all are what there is here.
    told[told.index("--tp") + 1] = "2"
    recorder = Recorder(tmp_path)
    own = own_variables(tmp_path, **({} if starts_ranks else {"python": recorder.path}))
    given |= {"MASTER": "127.0.0.1", "GPUS": "1", "PORT": free_port(), **own}
    command = [*container["command"], *told, *TINY[:-2]]
    with contextlib.ExitStack() as stack:
        runs = [
            stack.enter_context(Program(*command, folder=ROOT, JOB_COMPLETION_INDEX=str(index), **given))
            for index in range(2)
        ]
        for run in runs:
            run.finish()
    if starts_ranks:
        assert steps(tmp_path / "runs/train") == 2
    else:
        recorder.check(port=given["PORT"], out=tmp_path / "runs/train")
