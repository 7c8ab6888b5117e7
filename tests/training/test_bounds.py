"""Every numeric setting of every command takes a value that it can use, or refuses it by its name, before PyTorch."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest
from harness.program import run
from hypothesis import example, given, strategies as st

from shardwise.cli.arguments import parse_command
from shardwise.cli.conversion import ExportArguments, ExportMegatronArguments, ImportArguments, ImportMegatronArguments
from shardwise.cli.inference import ChatArguments, EvalArguments, GenerateArguments
from shardwise.cli.training import DemoArguments, FinetuneArguments, TrainArguments, demo_settings
from shardwise.core.errors import ConfigError
from shardwise.run.settings import FinetuneSettings, Settings
from shardwise.training.bounds import Range, annotations_of, check_values, range_of


def parse(cls):
    return lambda argv: parse_command(cls, argv, "shardwise")


parse_train_arguments, parse_finetune_arguments = parse(TrainArguments), parse(FinetuneArguments)


def parse_demo(argv):
    return demo_settings(parse(DemoArguments)(argv))


COMMANDS = {
    "train": (parse_train_arguments, ["--data", "x"], Settings),
    "finetune": (parse_finetune_arguments, ["base", "--data", "x"], FinetuneSettings),
    "generate": (parse(GenerateArguments), ["run"], GenerateArguments),
    "chat": (parse(ChatArguments), ["model"], ChatArguments),
    "eval": (parse(EvalArguments), ["model", "--data", "x"], EvalArguments),
    "import-hf": (parse(ImportArguments), ["folder", "--out", "x"], ImportArguments),
    "import-megatron": (parse(ImportMegatronArguments), ["folder", "--out", "x"], ImportMegatronArguments),
    "export-hf": (parse(ExportArguments), ["run", "--out", "x"], ExportArguments),
    "export-megatron": (parse(ExportMegatronArguments), ["run", "--out", "x"], ExportMegatronArguments),
    "demo": (parse_demo, [], DemoArguments),
}


def numbers_of(cls: type, prefix: str = "") -> dict[str, tuple[type, Range | None]]:
    """Each numeric field by its dotted name: its kind and range."""
    found: dict[str, tuple[type, Range | None]] = {}
    for name, (annotation, marks) in annotations_of(cls).items():
        kinds = getattr(annotation, "__args__", (annotation,))
        if dataclasses.is_dataclass(annotation):
            found |= numbers_of(annotation, f"{prefix}{name}.")
        elif kind := next((kind for kind in (int, float) if kind in kinds), None):
            found[prefix + name] = (kind, range_of(marks))
    return found


def flag_of(command: str, name: str) -> str:
    name = name.replace("_", "-")
    # Groups whose flags stand alone.
    return "--" + (
        name.rpartition(".")[2]
        if command == "finetune" and name.startswith(("parallel.", "lora.", "samples.", "labels."))
        else name
    )


FLAGS = [(command, name) for command, (_, _, cls) in COMMANDS.items() for name in numbers_of(cls)] + [
    ("train", "nproc"),
    ("finetune", "nproc"),
]
AWKWARD: list[float] = [math.nan, math.inf, -math.inf, -1, 0, 1e20, 1e308, 5e-324, 2**63, 2**64, 10**400, -(2**70)]
NUMBERS = st.one_of(st.sampled_from(AWKWARD), st.integers(), st.floats())


def test_every_number_has_a_range():
    """None was forgotten, and every default is within its own."""
    for _, _, cls in COMMANDS.values():
        numbers = numbers_of(cls)
        assert numbers
        assert [name for name, (_, limits) in numbers.items() if limits is None] == []
        for _, limits in numbers.values():
            assert math.isfinite(limits.low)
            assert math.isfinite(limits.high)
    assert len(FLAGS) > 60


@pytest.mark.slow
@pytest.mark.sample(40)
@pytest.mark.parametrize(("command", "name"), FLAGS)
def test_a_flag_takes_a_number_or_refuses_it_by_its_name(command, name):
    parser, others, cls = COMMANDS[command]
    flag = flag_of(command, name)
    _, limits = numbers_of(cls).get(name, (int, Range(1, 1024)))
    if name.startswith("lora.") and name != "lora.lora_rank":
        others = [*others, "--lora-rank", "4"]
    if limits is not None:
        kind, low = numbers_of(cls).get(name, (int, None))[0], limits.low
        usable = next(each for each in (1, 2, 257, 0.5, 0.0, low) if kind(each) in limits and kind(each) == each)
        taken(lambda: parser([*others, f"{flag}={usable}"]), limits)
    for value in ("nan", "-inf", "1e308", "9" * 5000):
        assert limits is None or float(value) not in limits
        with pytest.raises(ConfigError) as caught:
            parser([*others, f"{flag}={value}"])
        message = str(caught.value)
        assert flag.lstrip("-") in message or f"parallel.{flag.lstrip('-')}" in message
        # What is too long to be shown is described.
        assert (
            value in message
            or value.replace("e", "e+") in message
            or "9999" in message
            or "inf" in message
            or "too large" in message
        )
        assert len(message) < 400


@pytest.mark.parametrize("cls", [Settings, FinetuneSettings, GenerateArguments, ExportArguments, DemoArguments])
@given(data=st.data())
def test_a_number_of_any_kind_is_taken_or_refused(cls, data):
    """As from TOML files and the JSON of checkpoints, where 1e999 and booleans are possible."""
    numbers = numbers_of(cls)
    name = data.draw(st.sampled_from(sorted(numbers)))
    value = data.draw(st.one_of(NUMBERS, st.booleans(), st.just("7"), st.just([1]), st.just({})))
    kind, limits = numbers[name]
    usable = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and (kind is float or isinstance(value, int))
        and value in limits
        and math.isfinite(value)
    )
    group, _, last = name.rpartition(".")
    part = next((hint for field, (hint, _) in annotations_of(cls).items() if field == group), cls) if group else cls
    values = {**required(part), last: value}
    if not usable:
        with pytest.raises(ConfigError, match=re.escape(last.replace("_", "-"))) as caught:
            part(**values)
        assert len(str(caught.value)) < 400
        return
    made = taken(lambda: part(**values), limits)
    if made is not None:
        assert getattr(made, last) == value
        json.dumps(dataclasses.asdict(made), allow_nan=False)


def taken(make: Callable[[], Any], limits: Range | None) -> Any:
    """What is made of a value in range; None if it contradicts another one: heads that do not divide the width, say."""
    try:
        return make()
    except ConfigError as error:
        refusal = str(error)
    assert str(limits) not in refusal
    return None


def required(cls: type) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING}
    given = {"checkpoint": "run", "folder": "f", "out": "o"} | (
        {"lora_rank": 4} if "lora_rank" in annotations_of(cls) else {}
    )
    return {name: value for name, value in given.items() if name in names or name == "lora_rank"}


@pytest.mark.parametrize(
    "text", ["inf", "nan", "-inf", "1e999", "9" * 400, "true", '"1"', "0x" + "f" * 4000, "9" * 5000]
)
@pytest.mark.parametrize(
    "name", ["optimizer.epsilon", "optimizer.clip_grad_norm", "training.steps", "model.vocab_size"]
)
def test_a_number_in_a_toml_file(tmp_path, name, text):
    path = tmp_path / "run.toml"
    table, _, last = name.partition(".")
    path.write_text(f'data = ["x"]\n[{table}]\n{last} = {text}\n')
    with pytest.raises(ConfigError) as caught:
        parse_train_arguments(["--config", str(path)])
    assert "is not TOML" in str(caught.value) or last in str(caught.value).replace("-", "_")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("optimizer", "clip_grad_norm"), math.inf),
        (("training", "steps"), 1e9),
        (("model", "num_layers"), True),
        (("model", "architecture"), ["llama"]),
        (("model", "tie_embeddings"), 1),
        (("corpus", "text_key"), None),
        (("resume",), "sometimes"),
        (("model",), None),
    ],
)
def test_a_value_in_the_json_of_a_checkpoint(where, value):
    settings = Settings(data=("x",)).to_json()
    assert Settings.from_json(json.loads(json.dumps(settings))) == Settings(data=("x",))
    place = settings
    for name in where[:-1]:
        place = place[name]
    place[where[-1]] = value
    with pytest.raises(ConfigError, match=where[-1].replace("_", ".")):
        Settings.from_json(json.loads(json.dumps(settings)))


def test_a_model_that_no_rank_could_hold_is_refused_before_memory_is_asked_for():
    settings = parse_train_arguments(
        ["--data", "x", "--model.num-layers", "10000", "--model.hidden-size", "1048576"]
    ).settings
    with pytest.raises(ConfigError, match=r"model\.num-layers 10000.* parameters, .* GB of weights per rank"):
        settings.check_world(1)


def test_the_message_names_flag_value_and_range():
    def message(*argv):
        with pytest.raises(ConfigError) as caught:
            parse_train_arguments(["--data", "x", *argv])
        return str(caught.value)

    assert message("--optimizer.clip-grad-norm", "inf") == "optimizer.clip-grad-norm is inf; it must be from 0 to 1e+30"
    assert message("--optimizer.epsilon=nan") == "optimizer.epsilon is nan; it must be a number, from 1e-30 to 10,000"
    assert message("--model.vocab-size=10000000000") == (
        "model.vocab-size is 10000000000; it must be from 257 to 4,194,304"
    )
    assert message("--corpus.held-out-fraction=1") == "corpus.held-out-fraction is 1.0; it must be between 0 and 1"
    assert message("--optimizer.learning-rate=0") == (
        "optimizer.learning-rate is 0.0; it must be over 0 and at most 1e+30"
    )


def test_kinds_that_are_no_numbers():
    @dataclasses.dataclass(frozen=True)
    class Some:
        names: tuple[str, ...] = ("a",)
        choice: Literal["a", "b"] = "a"
        other: Literal["a", "b"] | None = None
        share: Annotated[float, Range(0, 1)] = 0.5

    annotations_of.cache_clear()
    globals()["Some"] = Some
    check_values(Some())
    check_values(Some(other="b"))
    for wrong in (
        Some(names=("a", 1)),
        Some(names="a"),
        Some(choice="c"),
        Some(choice=None),
        Some(other="c"),
        Some(share="x" * 999),
    ):
        with pytest.raises(ConfigError, match=r"^x\.(names|choice|other|share) is .{1,70}; it must be"):
            check_values(wrong, "x.")


@given(
    value=st.integers() | st.floats(),
    low=st.integers(-9, 9),
    size=st.integers(0, 9),
    ends=st.tuples(st.booleans(), st.booleans()),
)
@example(value=math.nan, low=0, size=1, ends=(True, True))
def test_a_range_is_what_it_says(value, low, size, ends):
    limits = Range(low, low + size, *ends)
    expected = low <= value <= low + size and (ends[0] or value != low) and (ends[1] or value != low + size)
    assert (value in limits) == expected


def test_mistakes_are_said_without_torch(tmp_path):
    (tmp_path / "stopped/checkpoints/step-00000003").mkdir(parents=True)
    manifest = {"serial": 1, "meta": {"settings": {"training": {"steps": 9}}, "base_sha256": "0"}}
    (tmp_path / "stopped/checkpoints/step-00000003/meta.json").write_text(json.dumps(manifest))
    (tmp_path / "text.txt").write_text("text")
    code = """
import sys
from shardwise.cli.main import main
for argv in (["train", "--data", "x", "--optimizer.epsilon", "inf"], ["generate", "run", "--top-p", "nan"],
             ["finetune", "base", "--data", "x", "--lora-rank", "99999999999"], ["demo", "--steps", "0"],
             ["export-hf", "run", "--out", "x", "--max-file-gb", "inf"], ["import-hf", "f", "--out", "x", "--nproc=0"]):
    assert main(argv) == 2, argv
for argv in ("train --data none", "finetune none --data text.txt", "chat none", "chat stopped",
             "import-hf none --out x", "eval stopped --data text.txt", "eval . --data none", "export-hf none --out x",
             "train --data text.txt --out stopped", "finetune . --data text.txt --out stopped"):
    argv = argv.split()
    assert main(argv) == 2, argv
assert "torch" not in sys.modules
"""
    done = run("-c", code, folder=tmp_path)
    said = done.stderr.splitlines()
    assert len(said) == 16
    assert sum("data path 'none' does not exist" in line for line in said) == 2
    assert sum("there is no folder none" in line for line in said) == 4
    # A run that was stopped has one way on, whichever command finds it.
    assert sum("the run stopped at step 3; add --resume auto to its command to go on" in line for line in said) == 4


def test_a_path_may_begin_with_the_home_folder_and_may_not_be_empty(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    home = str(tmp_path / "x")
    # As shells leave it in --out=~/x.
    assert Settings(data=("stdlib",), out="~/x").out == home
    tuned = FinetuneSettings(base="~/x", data=("stdlib",), out="~/x")
    assert (tuned.base, tuned.out) == (home, home)
    exported = ExportArguments("~/x", "~/x")
    assert (exported.checkpoint, exported.out) == (home, home)
    imported = ImportArguments("~/x", "~/x")
    assert (imported.folder, imported.out) == (home, home)
    generated = GenerateArguments("~/x", adapter="~/x")
    assert (generated.checkpoint, generated.adapter) == (home, home)
    for make, name in (
        (lambda: GenerateArguments(""), "checkpoint"),
        (lambda: GenerateArguments("x", adapter=""), "--adapter"),
        (lambda: ExportArguments("", "x"), "checkpoint"),
        (lambda: ImportArguments("", "x"), "folder"),
        (lambda: ImportArguments("x", ""), "--out"),
    ):
        # Or it would be the current folder.
        with pytest.raises(ConfigError, match=f"^{name} is empty; name a folder"):
            make()
