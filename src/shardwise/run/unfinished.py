"""Runs that ended early, and the way to go on with them; found without PyTorch, which takes seconds to load."""

from pathlib import Path
from typing import Any

from shardwise.core.atomic_files import read_regular
from shardwise.core.errors import CheckpointError, ConfigError
from shardwise.core.json_text import MAX_TABLE_BYTES, parse_json


def resume_hint(checkpoint: Path | None) -> str:
    """Return how to go on after a run that ended early; ``checkpoint`` is the newest checkpoint, or None."""
    if checkpoint is None:
        return "no checkpoint was saved; run the same command again to start anew"
    return stopped_at(int(checkpoint.name.split("-")[1]))


def stopped_at(step: int) -> str:
    """Return the one sentence about a run that ended early, after ``step`` steps."""
    return f"the run stopped at step {step}; add --resume auto to its command to go on"


def check_unused(out: Path) -> None:
    """Raise ConfigError if a folder has a checkpoint, which a run without ``--resume`` would not go on from.

    A checkpoint that cannot be read is left to the run, which names the damage.
    """
    if (found := _newest(out)) is not None:
        raise ConfigError(already_there(out, *found))


def already_there(out: Path, name: str, meta: dict[str, Any]) -> str:
    """Return the message about the newest checkpoint in ``out``, by its name and its ``meta``."""
    step, steps = int(name.split("-")[1]), _steps(meta)
    if steps is not None and step < steps:
        return f"{out}: {stopped_at(step)}, or --resume restart to start over, or choose another --out"
    return (
        f"{out} has a checkpoint already ({name}); continue it with --resume auto, start over with --resume restart, "
        "or choose another --out"
    )


def check_done(out: Path) -> None:
    """Raise CheckpointError for a run of fine-tuning that has saved checkpoints, but has not written its result."""
    results = (out / "config.json", out / "adapter_config.json", out / "meta.json")
    if not any(each.exists() for each in results) and (found := _newest(out)) is not None and "base_sha256" in found[1]:
        raise CheckpointError(f"{out} has no model yet: {stopped_at(int(found[0].split('-')[1]))}")


def _newest(out: Path) -> tuple[str, dict[str, Any]] | None:
    """Return name and meta of the last published checkpoint of a run, if it can be read."""
    found = []
    for path in (out / "checkpoints").glob("step-*/meta.json"):
        try:
            manifest = parse_json(read_regular(path, limit=MAX_TABLE_BYTES))
        except (OSError, ValueError):
            continue
        if isinstance(manifest.get("serial"), int) and isinstance(manifest.get("meta"), dict):
            found.append((manifest["serial"], path.parent.name, manifest["meta"]))
    return max(found, key=lambda each: each[0])[1:] if found else None


def _steps(meta: dict[str, Any]) -> int | None:
    """Return the number of steps in the settings of a checkpoint."""
    table = meta.get("settings")
    for name in ("training", "steps"):
        table = table.get(name) if isinstance(table, dict) else None
    return table if isinstance(table, int) else None
