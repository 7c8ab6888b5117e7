"""The command as a user calls it: what it prints, and its exit code."""

import errno
import os
import sys

import pytest
from harness.program import Program, run

import shardwise
from shardwise.cli.main import COMMANDS, main
from shardwise.cli.reporting import describe, run_command
from shardwise.core.errors import CheckpointError, ConfigError, DataError, LaunchError, ParityError
from shardwise.training.bounds import nearest


def call(*argv, program=(sys.executable, "-m", "shardwise"), **variables):
    """Run the command; a launcher's variables come from ``variables`` alone."""
    process = run(*program, *argv, exit_code=None, **variables)
    return process.returncode, process.stdout, process.stderr


def test_help_and_mistakes_do_not_wait_for_torch(tmp_path):
    (tmp_path / "text.txt").write_text("text")
    lines = """
        --help | --version | train --help | plan --help | env --help | nonsense
        train --data missing
        train --data 0.7 text.txt 0.3 missing
        train --data text.txt --corpus.tokenizer missing
        finetune missing --data text.txt
        finetune . --data text.txt --held-out missing
        finetune . --data text.txt --prompt-template missing
        finetune . --data text.txt --lora-from missing
        dpo missing --data text.txt
        plan missing | plan finetune missing | plan dpo missing | plan generate missing
        plan --fit much | plan --host-bandwidth fast | plan --picture .
        chat missing | chat . --adapter missing
        generate missing | generate . --adapter missing
        eval . --data missing | eval . --data text.txt --prompt-template missing
        doctor missing missing | doctor train --data missing
        compare missing missing
        import-hf missing --out out
        export-hf missing --out out
        tokenize --data missing --tokenizer missing --out out
        completion bash --help | completion csh
    """
    commands = [line.split() for line in lines.replace("|", "\n").splitlines() if line.strip()]
    code = f"""
import sys
from shardwise.cli.main import main
for argv in {commands!r}:
    with_help = any(word in ("--help", "--version") for word in argv)
    try:
        code = main(argv)
    except SystemExit as end:
        code = end.code
    assert (code or 0) == (0 if with_help else 2), argv
    assert "torch" not in sys.modules, argv
"""
    code, _, error = call(program=[sys.executable, "-c", code], folder=tmp_path)
    assert code == 0, error
    mistakes = sum("help" not in " ".join(argv) and argv != ["--version"] for argv in commands)
    assert error.count(": error: ") == len(error.splitlines()) == mistakes


def test_help_lists_the_commands(capsys):
    assert main(["--help"]) == 0
    text, error = capsys.readouterr()
    assert error == ""
    for name, command in COMMANDS.items():
        assert text.count(f"  {name:<{max(map(len, COMMANDS))}}  {command.summary}\n") == 1
    begin = text.partition("first steps:\n")[2].partition("\n\n")[0]
    assert [line.split()[0] for line in begin.splitlines()] == ["demo", "train", "generate", "finetune", "plan"]
    assert main([]) == 2
    assert capsys.readouterr() == ("", text)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"shardwise {shardwise.__version__}\n"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("trian", "unknown command 'trian'; did you mean train?"),
        (
            "xyz",
            "unknown command 'xyz'; one of demo, train, finetune, dpo, plan, doctor, generate, score, chat, eval, "
            "compare, tokenize, import-hf, import-megatron, export-hf, export-megatron, conformance, env, completion",
        ),
        ("--verson", "unknown option '--verson'; did you mean --version?"),
    ],
)
def test_an_unknown_command_is_one_line(capsys, word, message):
    assert main([word]) == 2
    assert capsys.readouterr() == ("", f"shardwise: error: {message}\n")


def test_a_mistake_is_one_line_and_with_debug_a_stack_trace_too(capsys):
    assert main(["train", "--model.num-layerz", "3"]) == 2
    line = "shardwise train: error: unknown flag --model.num-layerz; did you mean --model.num-layers?\n"
    assert capsys.readouterr() == ("", line)
    assert main(["train", "--model.num-layerz", "3", "--debug"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("Traceback (most recent call last):\n")
    assert error.endswith("\n" + line)


def test_a_missing_settings_file_is_one_line(capsys, tmp_path):
    assert main(["train", "--config", str(tmp_path / "none.toml")]) == 2
    assert capsys.readouterr().err == (f"shardwise train: error: {tmp_path / 'none.toml'}: No such file or directory\n")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--nproc", "3", "--parallel.tp", "2"],
            "parallel.tp 2 does not divide the 3 ranks; start a multiple of 2 with --nproc, torchrun or on_ranks",
        ),
        (
            ["--nproc", "2", "--training.global-batch-size", "3"],
            "training.global-batch-size 3 is not a multiple of the 2 data-parallel ranks (2 ranks / tp 1)",
        ),
    ],
)
def test_a_layout_that_cannot_be_is_heard_of_before_any_rank_starts(capsys, argv, message):
    assert main(["train", "--data", "a", *argv]) == 2
    assert capsys.readouterr() == ("", f"shardwise train: error: {message}\n")


@pytest.mark.parametrize(
    ("argv", "variables", "message"),
    [
        (
            ["--nproc", "4"],
            {"RANK": "0", "WORLD_SIZE": "2"},
            "--nproc asks for 4 ranks, but the launcher started 2; leave --nproc out",
        ),
        (
            ["--parallel.tp", "2"],
            {"RANK": "0", "WORLD_SIZE": "3"},
            "parallel.tp 2 does not divide the 3 ranks; start a multiple of 2 with --nproc, torchrun or on_ranks "
            "(WORLD_SIZE=3 is in the environment; unset it and RANK if no launcher set them)",
        ),
        ([], {"RANK": "0"}, "the environment has RANK=0 and WORLD_SIZE=None, which only a launcher sets; unset both"),
        (
            [],
            {"RANK": "2", "WORLD_SIZE": "2"},
            "the environment has RANK=2 and WORLD_SIZE=2, which only a launcher sets; unset both",
        ),
    ],
)
def test_a_launchers_ranks_are_checked(argv, variables, message):
    assert call("train", "--data", "a", *argv, **variables) == (2, "", f"shardwise train: error: {message}\n")


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        # Some begin like flags of torchrun's own.
        (["--data", "a", "--model.num-layers", "4", "--out", "x", "--resume=auto", "--model.dropout=2"],
         "model.dropout is 2.0; it must be at least 0 and under 1"),
        (["--", "--data", "a", "--nproc", "3"],
         "--nproc asks for 3 ranks, but the launcher started 2; leave --nproc out"),
    ],
)  # fmt: skip
def test_torchrun_starts_the_ranks_and_hands_on_the_flags(flags, message):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    code, output, error = call("train", *flags, program=[*torchrun, "-m", "shardwise"], OMP_NUM_THREADS="1")
    assert code == 1  # torchrun's own.
    assert output == ""
    assert error.count(f"shardwise train: error: {message}\n") == 1


def test_output_that_nobody_reads_is_no_error():
    read, write = os.pipe()
    os.close(read)
    with Program("-m", "shardwise", "train", "--help", stdout=write) as process:
        os.close(write)
        assert process.finish(exit_code=141).stderr == ""


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        (ConfigError("no\nway"), "no way", 2),
        (DataError("a.jsonl, line 3: not JSON"), "a.jsonl, line 3: not JSON", 2),
        (CheckpointError("damaged"), "damaged", 2),
        (ParityError("loss differs"), "loss differs", 1),
        (LaunchError("could not start"), "could not start", 1),
        (PermissionError(errno.EACCES, "Permission denied", "runs/x"), "runs/x: Permission denied", 2),
        (OSError(errno.EROFS, "Read-only file system", "runs/x"), "runs/x: Read-only file system", 2),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device", 1),
        (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero; run again with --debug for the stack trace", 1),
        (MemoryError(), "MemoryError; run again with --debug for the stack trace", 1),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(capsys, error, line, code):
    def fail():
        raise error

    assert describe(error) == (line, code)
    assert run_command("shardwise train", fail) == code
    assert capsys.readouterr() == ("", f"shardwise train: error: {line}\n")


def test_a_long_message_is_cut():
    assert len(describe(RuntimeError("x" * 10_000))[0]) < 500


def test_a_ctrl_c_is_one_line(capsys):
    import signal

    assert run_command("shardwise env", lambda: signal.raise_signal(signal.SIGINT)) == 130
    assert capsys.readouterr() == ("", "shardwise env: interrupted\n")


def test_the_nearest_name():
    known = ["model.num_layers", "parallel.tp", "training.steps", "optimizer.warmup_steps", "optimizer.name"]
    known += ["optimizer.learning_rate", "optimizer.weight-decay"]
    assert nearest("tp", known) == "parallel.tp"
    assert nearest("optimizer.tp", known) == "parallel.tp"
    assert nearest("training.step", known) == "training.steps"
    assert nearest("optimizer.lr", known) == nearest("lr", known) == "optimizer.learning_rate"
    assert nearest("optimizer.wd", known) == "optimizer.weight-decay"
    assert nearest("optimizer.zz", known) is nearest("optimizer.r", known) is None, "the group alone is no likeness"
    assert nearest("zzz", known) is None
