"""Defaults, TOML file and flags become settings; a mistake in them becomes one line."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from shardwise.cli import plan
from shardwise.cli.arguments import parse_command
from shardwise.cli.conversion import ExportArguments, ExportMegatronArguments, ImportArguments, ImportMegatronArguments
from shardwise.cli.inference import ChatArguments, EvalArguments, GenerateArguments, ScoreArguments
from shardwise.cli.main import COMMANDS
from shardwise.cli.training import DemoArguments, DpoArguments, FinetuneArguments, TrainArguments
from shardwise.core.errors import ConfigError
from shardwise.run.settings import Settings


def of(cls):
    return lambda argv: parse_command(cls, argv, "shardwise")


parse_train_arguments, parse_finetune_arguments = of(TrainArguments), of(FinetuneArguments)
PARSERS = {
    "train": parse_train_arguments,
    "finetune": parse_finetune_arguments,
    "dpo": of(DpoArguments),
    "demo": of(DemoArguments),
    "generate": of(GenerateArguments),
    "chat": of(ChatArguments),
    "score": of(ScoreArguments),
    "eval": of(EvalArguments),
    "import-hf": of(ImportArguments),
    "import-megatron": of(ImportMegatronArguments),
    "export-hf": of(ExportArguments),
    "export-megatron": of(ExportMegatronArguments),
}
PLANS = {f"plan {kind}": of(getattr(plan, name)) for kind, name in COMMANDS["plan"].kinds.items()}
REQUIRED = dict(
    zip(
        PARSERS.values(),
        (
            ["--data=a"],
            *[["m", "--data=a"]] * 2,
            [],
            ["r"],
            ["r"],
            ["r"],
            ["r", "--data=a"],
            *[["m", "--out=o"]] * 2,
            *[["r", "--out=o"]] * 2,
        ),
        strict=True,
    )
)


def settings(*argv):
    return parse_train_arguments(argv).settings


@pytest.fixture
def toml(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text):
        (tmp_path / "run.toml").write_text(text)
        return "--config", "run.toml"

    return write


def test_flags_override_the_file_which_overrides_the_defaults(toml):
    config = toml(
        'data = ["a", "b"]\nresume = "auto"\n[model]\nnum_layers = 7\nffn-hidden-size = 96\n[optimizer]\nepsilon = 1\n'
    )
    arguments = parse_train_arguments(
        [*config, "--model.num-layers", "8", "--parallel.tp=2", "--model.no-tie-embeddings", "--nproc", "4"]
    )
    expected = Settings(data=("a", "b"), resume="auto")
    expected = dataclasses.replace(
        expected,
        model=dataclasses.replace(expected.model, num_layers=8, ffn_hidden_size=96, tie_embeddings=False),
        optimizer=dataclasses.replace(expected.optimizer, epsilon=1.0),
        parallel=dataclasses.replace(expected.parallel, tp=2),
    )
    assert arguments.settings == expected
    assert isinstance(arguments.settings.optimizer.epsilon, float)
    assert (arguments.nproc, arguments.debug) == (4, False)


def test_without_a_file_or_flags_the_defaults_stand():
    arguments = parse_train_arguments(["--data", "a", "b", "--debug"])
    assert arguments.settings == Settings(data=("a", "b"))
    assert (arguments.nproc, arguments.debug) == (None, True)


def test_second_names_of_flags():
    short = settings("--data", "a", "--lr", "0.5", "--batch-size", "8", "--steps=3")
    assert short == settings(
        "--data", "a", "--optimizer.learning-rate", "0.5", "--training.global-batch-size", "8", "--training.steps", "3"
    )


def test_the_file_has_the_short_names_of_flags(toml):
    path = toml('data = ["a"]\n[optimizer]\nlr = 0.5\n[training]\nbatch-size = 3')
    settings = parse_train_arguments(path).settings
    assert (settings.optimizer.learning_rate, settings.training.global_batch_size) == (0.5, 3)


def test_a_flag_may_mend_what_contradicts_itself_in_the_file(toml):
    # Editors of Windows write a byte-order mark.
    config = toml('\ufeffdata = ["a"]\n[model]\nhidden_size = 40\n')
    assert settings(*config, "--model.num-heads", "4").model.num_heads == 4
    # 40 / 8 is odd, which rotary positions cannot have.
    with pytest.raises(ConfigError, match="40 / 8 is odd"):
        settings(*config)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model.num-layerz", "3"], "unknown flag --model.num-layerz; did you mean --model.num-layers?"),
        (["--stepz=2"], "unknown flag --stepz; did you mean --steps?"),
        (["--training.warmup=2"], "unknown flag --training.warmup; did you mean --optimizer.warmup-steps?"),
        (["--warmup=2"], "unknown flag --warmup; did you mean --optimizer.warmup-steps?"),
        (["--active=2"], "unknown flag --active; did you mean --profile.active?"),
        (["--qqqqqq"], "unknown flag --qqqqqq; see --help"),
        (["--model.num-layers", "x"], "--model.num-layers is 'x'; it must be an integer"),
        (["--model.num-layers", "3.5"], "--model.num-layers is '3.5'; it must be an integer"),
        (["--model.num-layers"], "--model.num-layers needs a value"),
        (["--out", "--data", "a"], "--out needs a value"),
        (["--config"], "--config needs a value"),
        (["--resume", "yes"], "--resume is 'yes'; it must be one of 'auto', 'never', 'restart'"),
        (["stray"], "no flag takes stray; files and folders of data go after --data"),
        (["--data", "a", "--data", "b"], "--data is given twice; write all its values after one --data"),
        (["--debug", "1"], "--debug takes no value, got '1'"),
        (
            ["--model.tie-embeddings=False"],
            "--model.tie-embeddings takes no value, got 'False'; "
            "write --model.tie-embeddings or --model.no-tie-embeddings",
        ),
        ([], "no text to train on; pass --data with files or folders, or --data stdlib"),
        (["--data"], "no text to train on; pass --data with files or folders, or --data stdlib"),
    ],
)
def test_a_mistake_in_the_flags_is_one_line(argv, message, capfd):
    with pytest.raises(ConfigError) as caught:
        parse_train_arguments(argv)
    assert str(caught.value) == message
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\nnum_layer = 3", "run.toml: unknown setting model.num_layer; did you mean model.num_layers?"),
        ("num_layers = 3", "run.toml: unknown setting num_layers; did you mean model.num_layers?"),
        ("qqqqqq = 3", "run.toml: unknown setting qqqqqq"),
        (
            '"model.num_layers" = 3',
            "run.toml: model.num_layers is not one key; give the table model with the key num_layers",
        ),
        ("model = 3", "run.toml: model is 3; it must be a table of settings"),
        ('[model]\nnum_layers = "3"', "run.toml: model.num_layers is '3'; it must be an integer"),
        ("[model]\nnum_layers = 3.0", "run.toml: model.num_layers is 3.0; it must be an integer"),
        ("[model]\nnum_layers = true", "run.toml: model.num_layers is true; it must be an integer"),
        ("[training]\nseed = 2020-01-01", "run.toml: training.seed is 2020-01-01; it must be an integer"),
        ("[optimizer]\nlr = 1\nlr = 2", "run.toml is not TOML: lr is given twice (at line 3)"),
        (
            "[optimizer]\nlr = 0.1\nlearning_rate = 0.1",
            "run.toml: optimizer.learning_rate is given twice, under two names; leave one of them out",
        ),
        (
            "[model]\nnum-layers = 1\nnum_layers = 1",
            "run.toml: model.num_layers is given twice, under two names; leave one of them out",
        ),
        ("[model]\n[model]", "run.toml is not TOML: Cannot declare [model] twice (at line 2, column 7)"),
        ("q" * 100_000 + " = 3", f"run.toml: unknown setting {'q' * 60}..."),
        (
            "lora_rank = 3",
            "run.toml: lora_rank is a setting of shardwise finetune and dpo, not of this command; leave it out",
        ),
        ("[model]\nffn_hidden_size = []", "run.toml: model.ffn_hidden_size is []; it must be an integer"),
        ("[model]\ntie_embeddings = 1", "run.toml: model.tie_embeddings is 1; it must be true or false"),
        ('[model]\ndropout = "x"', "run.toml: model.dropout is 'x'; it must be a number"),
        ("out = 3", "run.toml: out is 3; it must be a string"),
        ('data = "a"', 'run.toml: data is \'a\'; it must be a list of strings, such as ["a.txt", "b"]'),
        ("data = [1, 2]", 'run.toml: data is [1, 2]; it must be a list of strings, such as ["a.txt", "b"]'),
        ('resume = "yes"', "run.toml: resume is 'yes'; it must be one of 'auto', 'never', 'restart'"),
        ("x =\ny = 2", "run.toml is not TOML: Invalid value (at line 1, column 4)"),
        ('data = ["a"]\n[model]\nnum_layers = 0', "model.num-layers is 0; it must be from 1 to 10,000"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(toml, text, message):
    with pytest.raises(ConfigError) as caught:
        parse_train_arguments(toml(text))
    assert str(caught.value) == message


def test_a_file_that_is_not_text_is_not_toml(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=rf"^{re.escape(str(path))} is not TOML: "):
        parse_train_arguments(["--config", str(path)])


def test_a_file_that_is_missing(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml: No such file or directory"):
        parse_train_arguments([f"--config={tmp_path / 'none.toml'}"])


def test_help_explains_every_setting_with_its_default(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        parse_train_arguments(["--help", "--config", "none.toml"])
    assert caught.value.code == 0
    text, error = capsys.readouterr()
    assert error == ""
    assert "\033" not in text
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.replace("│", " ").split())
    defaults = Settings(data=("x",))
    for field in dataclasses.fields(defaults):
        part = getattr(defaults, field.name)
        if not dataclasses.is_dataclass(part):
            continue
        for setting in dataclasses.fields(part):
            flag = f"--{field.name}.{setting.name}".replace("_", "-")
            # The flag, what it takes, an explanation of a few words, the default.
            entry = re.search(rf"{flag}(?:,| \[?[A-Z{{]).*?\(default: (.*?)\)", words)
            assert entry is not None, flag
            value = getattr(part, setting.name)
            assert entry[1] == (" ".join(value) if isinstance(value, tuple) else str(value)), flag
            assert len(entry[0].split()) > 5, flag
    nproc = "ranks to start on this machine; if not given, the fewest that tp, pp, cp, ep and etp allow."
    assert f"--nproc INT {nproc}" in words
    # tyro begins a new line where a line of a docstring begins with another character than a letter.
    for line, following in zip(rows := re.findall(r"^│ {7}(.*?) *│$", text, re.MULTILINE), rows[1:], strict=False):
        broken = not line.endswith(")") and len(line) + len(following.split()[0]) < 68
        assert not broken, (line, following)


@pytest.mark.parametrize("parse", [*PARSERS.values(), *PLANS.values()], ids=[*PARSERS, *PLANS])
def test_help_has_no_docstring_in_it(parse, capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    text = capsys.readouterr().out
    assert text.startswith("usage: shardwise ")
    assert "Attributes:" not in text


@pytest.mark.parametrize("parse", [*PARSERS.values(), *PLANS.values()], ids=[*PARSERS, *PLANS])
def test_each_flag_that_help_shows_is_read(parse, capsys, monkeypatch):
    """Help is tyro's and the parser is ours: both go by the same declarations."""
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        parse(["--help"])
    rows = re.findall(r"(?:  |│ )(--[a-z].*?)(?:  |│|\n)", capsys.readouterr().out)
    shown = {flag for row in rows for flag in re.findall(r"--[a-z][a-z.0-9-]*", row)}
    assert {"--tp", "--parallel.tp", "--debug"} <= shown
    of_ranks = {"--pp", "--parallel.pp", "--nproc"}
    assert parse in PLANS.values() or of_ranks <= shown
    for flag in shown:
        with pytest.raises(ConfigError) as caught:
            parse([f"{flag}=", "--unheard-of"])
        # A switch takes no value and a number is not empty; a text may be, and what follows is at fault.
        assert f"unknown flag {flag}" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"unknown flag --parallel\.tpp"):
        parse(["--parallel.tpp=2"])


@pytest.mark.parametrize("parse", PARSERS.values(), ids=PARSERS)
def test_the_number_of_ranks_is_spelled_alike_in_every_command(parse):
    """--tp, --pp and --nproc, short or long, a value after a space or an equals sign; the last one given holds."""
    several = parse in [PARSERS[name] for name in ("train", "finetune", "dpo", "demo")]
    for tp, pp in (("--tp", "--pp"), ("--parallel.tp", "--parallel.pp")):
        arguments = parse([*REQUIRED[parse], tp, "1", f"{tp}=2", pp, "2" if several else "1", "--nproc", "4"])
        split = arguments.settings.parallel if hasattr(arguments, "settings") else arguments
        assert (split.tp, split.pp, arguments.nproc) == (2, 2 if several else 1, 4)
        assert arguments.num_ranks == split.tp * split.pp


def test_commands_of_the_documents_are_read():
    root = Path(__file__).parents[2]
    line = re.compile(rf"^ *(?:\.venv/bin/)?shardwise ({'|'.join(PARSERS)}) (.*?\\?)$", re.MULTILINE)
    commands = [
        (page.name, command, arguments)
        for page in (root / "README.md", *sorted((root / "docs").rglob("*.md")))
        for command, arguments in line.findall(page.read_text().replace("\\\n", " "))
    ]
    assert {"README.md", "optimizers.md", "finetuning.md", "runs.md"} <= {page for page, _, _ in commands}
    assert len(commands) > 70
    for page, command, arguments in commands:
        # Dots stand for arguments of the reader.
        if "..." not in arguments and arguments != "--help":
            words = shlex.split(arguments, comments=True)
            # The shell takes what follows.
            stop = min((words.index(word) for word in ("&", ">", "2>&1") if word in words), default=len(words))
            PARSERS[command](words[:stop]), page


@pytest.mark.parametrize(
    "flags",
    [
        ("--sequence-length", "8"),
        ("--no-mask-prompts",),
        ("--no-special-tokens",),
        ("--text-key", "x"),
        ("--prompt-template", "x"),
    ],
    ids=str,
)
def test_flags_of_data_are_not_of_tasks(flags):
    with pytest.raises(ConfigError, match=f"{flags[0]} is for --data, which --tasks replaces; leave it out"):
        of(EvalArguments)(["model", "--tasks", "sums", *flags])
