"""The Hugging Face model card of a trained model: base model, data and settings."""

import dataclasses
import json
import platform
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch

import shardwise
from shardwise import run
from shardwise.core.atomic_files import read_regular
from shardwise.run.metrics import read_metrics
from shardwise.storage.huggingface.tensor_folder import BASE_README_NAME, README_NAME, own_file

_LARGEST_README = 16 << 20
# Folder of a model in the hub's cache.
_CACHED = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/")
_LICENCE = re.compile(r"^(license(?:_name|_link)?):[ \t]*(\S.*)$", re.MULTILINE)
# Settings that do not matter to the model's users, such as paths and speed.
_LEFT_OUT = ("base", "out", "data", "held_out", "resume", "lora_from", "track")


def model_card(
    settings: Any,
    out: Path,
    *,
    model_name: str,
    layout: Mapping[str, int],
    data: str,
    base: Path | None = None,
    is_adapter: bool = False,
    steps: int | None = None,
) -> str:
    """Return the text of ``README.md``."""
    name = None if base is None else base_name(base)
    fields: dict[str, Any] = {} if name is None else {"base_model": name}
    fields["library_name"] = "peft" if is_adapter else "transformers"
    licence = {} if base is None else _licence_of(base)
    fields |= licence
    fields["pipeline_tag"] = "text-generation"
    kind = "adapter" if is_adapter else "finetune"
    tags = ["shardwise", *(["lora"] if is_adapter else []), *([f"base_model:{kind}:{name}"] if name else [])]
    # JSON is valid YAML; the licence is copied unchanged.
    front = [f"{key}: {value if key in licence else json.dumps(value)}" for key, value in fields.items()]
    front.append(f"tags: {json.dumps(tags)}")
    title = Path(out).resolve().name
    what = f"Adapters for {name}, trained" if is_adapter else f"{name}, fine-tuned" if name else "A model, trained"
    lines = ["---", *front, "---", "", f"# {title}", "", f"{what} with Shardwise.", ""]
    if base is not None and own_file(base, README_NAME) is not None:
        lines += [f"The base model's own readme is [{BASE_README_NAME}]({BASE_README_NAME}).", ""]
    lines += ["## Training", "", "| | |", "|---|---|"]
    rows = {"model": model_name, "data": data, **_results(out, steps)}
    rows["ranks"] = ", ".join(f"{kind} {size}" for kind, size in layout.items())
    versions = {"shardwise": shardwise.__version__, "torch": torch.__version__, "Python": platform.python_version()}
    rows["versions"] = ", ".join(f"{package} {version}" for package, version in versions.items())
    lines += [f"| {key} | {_cell(value)} |" for key, value in rows.items()]
    if run.MODULES.get(next(iter(sys.argv[1:]), "")) == run.MODULES["train"]:
        lines += ["", "```", shlex.join(["shardwise", *sys.argv[1:]]), "```"]
    if changed := dict(_changed(settings)):
        lines += ["", "Settings that differ from the defaults:", "", "| setting | value |", "|---|---|"]
        lines += [f"| `{key}` | {_cell(value)} |" for key, value in changed.items()]
    return "\n".join([*lines, ""])


def of_merged(card: str) -> str:
    """Convert the card of adapters to a card of the model with the adapters merged."""
    merged = card.replace('library_name: "peft"', 'library_name: "transformers"', 1)
    merged = merged.replace("base_model:adapter:", "base_model:finetune:", 1)
    return re.sub(
        r"^Adapters for (.*), trained with Shardwise\.$",
        r"\1, with merged adapters trained with Shardwise.",
        merged,
        count=1,
        flags=re.MULTILINE,
    )


def base_name(base: Path) -> str:
    """Return the name of a model on the hub if its path shows it, else the name of its folder."""
    match = _CACHED.search(f"{base.resolve().as_posix()}/")
    return f"{match[1]}/{match[2]}" if match else base.resolve().name


def _licence_of(base: Path) -> dict[str, str]:
    """Return the licence fields in the front matter of a readme, unchanged."""
    path = own_file(base, README_NAME)
    try:
        text = "" if path is None else read_regular(path, limit=_LARGEST_README).decode(errors="replace")
    except OSError:
        return {}
    # A strange readme may be long, so each line is read once.
    first, *lines = map(str.rstrip, text.split("\n"))
    if first != "---" or "---" not in lines:
        return {}
    front = "\n".join(lines[: lines.index("---")])
    return {key: value.strip() for key, value in _LICENCE.findall(front)}


def _results(out: Path, steps: int | None) -> dict[str, str]:
    rows = read_metrics(out / "metrics.jsonl", below_step=steps)
    if not rows:
        return {}
    results = {"steps": str(rows[-1]["step"] + 1)}
    losses = [row["loss"] for row in rows if isinstance(row.get("loss"), float)]
    if losses:
        results["loss"] = f"{losses[0]:.4f} in the first step, {losses[-1]:.4f} in the last"
    for name in dict.fromkeys(key for row in rows for key in row if key.startswith("held_out")):
        values = [row[name] for row in rows if isinstance(row.get(name), float)]
        if values:
            results[name.replace("_", " ")] = f"{values[-1]:.4f} at the end"
    return results


def _changed(settings: Any, usual: Any = None, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the settings that differ from ``usual``, or by default from the defaults of their class."""
    for field in dataclasses.fields(settings):
        value, name = getattr(settings, field.name), prefix + field.name.replace("_", "-")
        if usual is not None:
            before = getattr(usual, field.name)
        else:
            made = field.default_factory is not dataclasses.MISSING
            before = cast(Any, field.default_factory)() if made else field.default
        if dataclasses.is_dataclass(value):
            yield from _changed(value, before, f"{name}.")
        elif field.name not in _LEFT_OUT and value != before:
            yield name, json.dumps(value, default=str)


def _cell(value: str) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")
