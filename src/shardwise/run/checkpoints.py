"""The content of a run's checkpoints, and the check that a checkpoint belongs to this run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise.core.communication.agreement import agree, barrier
from shardwise.core.errors import CheckpointError, ConfigError, DivergenceError
from shardwise.core.json_text import shown
from shardwise.core.sharded_state import sharded_state_dict
from shardwise.run.settings import CorpusSettings, LoraSettings, RunSettings
from shardwise.run.settings.run_settings import without_removed
from shardwise.run.tasks.task import Session
from shardwise.run.unfinished import already_there
from shardwise.storage import checkpoint
from shardwise.storage.adapters import lora_layers
from shardwise.storage.checkpoint import ParamShard
from shardwise.storage.checkpoint.folder import clear, step_of
from shardwise.storage.checkpoint.manifest import Manifest
from shardwise.training.optimizer.mixed_precision import PRECISIONS
from shardwise.training.optimizer.optimizer import optimizer_state, stored_weights
from shardwise.training.step_settings import micro_batch_size_of_parts
from shardwise.training.trainer import Trainer

# Settings that must not change when a run is resumed, because they determine the model and the order of samples.
_FIXED_TRAINING = ("global_batch_size", "seed")
_FIXED_SECTIONS = ("model", "lora", "preference")
_NOT_FINITE = "has values that are not finite"
_SECTIONS = (*_FIXED_SECTIONS, "training", "optimizer", "parallel", "samples", "corpus")


def run_state(session: Session) -> dict[str, ParamShard]:
    """Return weights and optimizer state of this rank, by name. The fp32 copy replaces a weight that has one."""
    session.trainer.wait_for_weights()
    return state_of(session.trainer)


def state_of(trainer: Trainer) -> dict[str, ParamShard]:
    """Return what a checkpoint holds of a trainer's rank, by name; see ``run_state``."""
    group = trainer.tp_group
    weights = {
        key: shard
        for key, shard in sharded_state_dict(trainer.model, group=group).items()
        # Frozen weights are loaded from the base model instead.
        if not isinstance(shard.data, Parameter) or shard.data.requires_grad
    }
    parts = {
        "model.": stored_weights(weights, trainer.optimizer),
        "optimizer.": optimizer_state(weights, trainer.optimizer),
    }
    return {prefix + key: shard.with_key(prefix + key) for prefix, part in parts.items() for key, shard in part.items()}


def begin_save(session: Session, step: int, snapshot: checkpoint.Snapshot | None = None) -> checkpoint.PendingSave:
    """Start saving the run after ``step`` steps; every rank calls.

    Args:
        step: number of completed steps.
        snapshot: memory for a copy of the state, which a thread then writes. If None, the state is written before
            returning.

    Raises:
        DivergenceError: a weight or its optimizer state is not finite; on every rank. Nothing is saved.
            With a snapshot the thread makes this check, and ``complete`` raises the error.
        CheckpointError: see ``storage.checkpoint.PendingSave``.
    """
    state, control = run_state(session), session.ranks.control

    def error(broken: str) -> DivergenceError:
        return DivergenceError(f"{broken} {_NOT_FINITE} after {step} steps")

    def check(name: str, data: Tensor) -> None:
        if first_not_finite({name: data}) is not None:
            raise error(name)

    if snapshot is None:
        _check_finite(state, error, control)
    return checkpoint.PendingSave(
        session.checkpoints,
        step,
        state,
        _identity(session)
        | {"settings": session.settings.to_json(), "num_samples": session.loader.end, "exact_version": _EXACT_VERSION}
        | _scaling(session.trainer),
        group=control,
        keep=session.settings.training.keep_checkpoints,
        extra_files=session.data.tokenizer.save,
        snapshot=snapshot,
        check=None if snapshot is None else check,
    )


def _check_finite(state: Mapping[str, ParamShard], error: Callable[[str], Exception], group: ProcessGroup) -> None:
    def check() -> None:
        if (broken := first_not_finite(state)) is not None:
            raise error(broken)

    agree(check, group=group)


def first_not_finite(tensors: Mapping[str, ParamShard] | Mapping[str, Tensor]) -> str | None:
    """Return the name of this rank's first tensor with a NaN or an infinity; None if all are finite.

    Each tensor is read once without a copy, which costs less than its checksums.
    """
    entries = {name: each.data.detach() for name, each in tensors.items() if each.data.numel()}
    # aminmax returns NaN for both if the tensor has one. The host waits for the device once.
    extremes = [torch.stack(tuple(torch.aminmax(tensor))).double() for tensor in entries.values()]
    if not extremes:
        return None
    finite = torch.stack(extremes).isfinite().all(dim=1).tolist()
    return next((name for name, is_finite in zip(entries, finite, strict=True) if not is_finite), None)


def start_or_resume(session: Session) -> tuple[int, Path | None]:
    """Start or resume the run according to ``settings.resume``; every rank calls."""
    control = session.ranks.control
    newest = agree(lambda: find_newest(session.settings), group=control)
    if session.settings.resume == "restart":
        barrier("the restart", group=control)
        if session.ranks.is_first:
            clear(session.checkpoints)
        barrier("the removal of earlier checkpoints", group=control)
    if newest is None:
        return 0, None
    step = agree(lambda: check_belongs(session, newest), group=control)
    trainer = session.trainer
    hint = "remove it to go on from the one before, or start anew with --resume restart"
    meta = load_state_(trainer, newest, step, group=control, hint=hint)
    if session.ranks.is_first and (note := _note_on_precision(trainer, newest, meta)):
        print(f"note   {note}", flush=True)
    return step, newest


def load_state_(
    trainer: Trainer, folder: Path, step: int, *, group: ProcessGroup, hint: str = "use another checkpoint"
) -> dict[str, Any]:
    """Load weights and optimizer state, so that the trainer goes on after ``step`` steps; every rank calls.

    Args:
        folder: the checkpoint.
        step: number of completed steps.
        hint: remedy for a checkpoint with values that are not finite.

    Returns:
        The contents of the checkpoint other than tensors.

    Raises:
        CheckpointError: the checkpoint is damaged, does not fit, or has values that are not finite.
    """
    trainer.wait_for_weights()
    state = state_of(trainer)
    meta = checkpoint.load(folder, state, group=group, convert=True)
    _check_finite(
        state,
        lambda broken: CheckpointError(f"{folder} is of a run that had diverged: {broken} {_NOT_FINITE}; {hint}"),
        group,
    )
    agree(lambda: _restore_scaling_(trainer, meta), group=group)
    # The optimizer does not count skipped steps.
    trainer.optimizer.set_step_(step - trainer.num_skipped)
    return meta


def _scaling(trainer: Trainer) -> dict[str, Any]:
    scale = {} if trainer.loss_scale is None else {"loss_scale": trainer.loss_scale.to_json()}
    return {"skipped_steps": trainer.num_skipped} | scale


def _restore_scaling_(trainer: Trainer, meta: Mapping[str, Any]) -> None:
    """Restore the values of ``_scaling``. Older runs recorded none and had no skipped steps."""
    skipped = meta.get("skipped_steps", 0)
    if type(skipped) is not int or skipped < 0:
        raise CheckpointError(f"skipped_steps of the checkpoint is {shown(skipped)}; it must be a count")
    trainer.num_skipped = skipped
    if trainer.loss_scale is not None and "loss_scale" in meta:
        trainer.loss_scale.restore_(meta["loss_scale"])


def _note_on_precision(trainer: Trainer, path: Path, meta: Mapping[str, Any]) -> str:
    """Return a note if a run resumes in another dtype, or if its weights were saved in fewer bits than it uses."""
    was, now = meta["settings"].get("training", {}).get("dtype"), trainer.settings.training.dtype
    changed = f"the run was in {was}, and goes on in {now} (--training.dtype)" if was not in (None, now) else ""
    stored = {tensor.dtype for name, tensor in Manifest.read(path).tensors.items() if name.startswith("model.")}
    narrow = stored & {torch.bfloat16, torch.float16}
    if not narrow or not PRECISIONS[now].has_masters:
        return changed
    made = f"{path} has no fp32 weights: they are made from its {str(narrow.pop()).removeprefix('torch.')} ones"
    return f"{changed}; {made}" if changed else made


def find_newest(settings: RunSettings) -> Path | None:
    """Return the checkpoint to resume from, if any. Also called before the data is read, which takes a while."""
    if settings.resume == "restart":
        return None
    newest = checkpoint.latest(Path(settings.out) / "checkpoints")
    if newest is not None and settings.resume == "never":
        raise ConfigError(already_there(Path(settings.out), newest.name, checkpoint.read_meta(newest)))
    return newest


def _identity(session: Session) -> dict[str, Any]:
    return {
        **session.task.identity,
        **session.data.identity,
        "corpus_sha256": session.data.sha256,
        "held_out_sha256": session.data.held_out_sha256,
        "tokenizer_sha256": session.data.tokenizer.sha256,
        "vocab_size": session.data.tokenizer.vocab_size,
    }


def draws_dropout(session: Session) -> bool:
    """Whether the run has dropout."""
    model = session.trainer.model
    adapters = [layer.lora_config.lora_dropout for layer in lora_layers(model)]
    return max(model.config.hidden_dropout, model.config.attention_dropout, *adapters) > 0


# Of the arithmetic of exact runs; another number means other bits. Earlier versions stored none.
_EXACT_VERSION = 2


def check_belongs(session: Session, folder: Path) -> int:
    """Check that this run may resume from a checkpoint, and return the checkpoint's step."""
    meta = checkpoint.read_meta(folder)
    if "settings" not in meta:
        raise CheckpointError(f"{folder} was not written by a training run: it has no settings")
    saved, step = meta["settings"], step_of(folder)
    if not isinstance(saved, dict) or not all(isinstance(saved.get(name, {}), dict) for name in _SECTIONS):
        raise CheckpointError(
            f"{folder} is damaged: its settings are {shown(saved)}; they must be an object of objects"
        )
    saved, ours = without_removed(saved), session.settings.to_json()
    # The merge of adapters at the end does not affect training.
    fixed = {name: ours[name].keys() - {"lora_merge"} for name in _FIXED_SECTIONS if name in ours}
    fixed["training"] = {*_FIXED_TRAINING, "rng"} if draws_dropout(session) else {*_FIXED_TRAINING}
    # Earlier versions lacked some settings; their runs used today's defaults.
    made = {"lora": LoraSettings(), "model": type(session.settings.model)()}
    defaults = {section: json.loads(json.dumps(dataclasses.asdict(each))) for section, each in made.items()}
    pairs = {
        f"{section}.{name}": (
            saved.get(section, {}).get(name, defaults.get(section, {}).get(name)),
            ours[section][name],
        )
        for section, names in fixed.items()
        for name in ours[section]
        if name in names
    }
    # Earlier versions did not keep the hash of the held-out data, and learned all answers.
    known = {"held_out_sha256": session.data.held_out_sha256, "learn": "all"} | meta
    pairs |= {name: (known.get(name), value) for name, value in _identity(session).items()}
    pairs["held-out data"] = _held_out(saved, folder), _held_out(ours, folder)
    # The optimizers keep different states. Versions without the setting always used AdamW.
    pairs["optimizer.name"] = (saved.get("optimizer", {}).get("name", "adamw"), ours["optimizer"]["name"])
    if ours["parallel"]["exact"] and saved.get("parallel", {}).get("exact"):
        version = meta.get("exact_version", 1)
        if version != _EXACT_VERSION:
            raise CheckpointError(
                f"{folder} is of an exact run of an {'earlier' if version == 1 else 'other'} version of Shardwise, "
                f"whose attention and loss round in another way (version {shown(version)} of exact arithmetic, now "
                f"{_EXACT_VERSION}): its results cannot be continued bit for bit; resume it with that version of "
                "Shardwise, or export the model (shardwise export-hf) and train on from it (shardwise finetune)"
            )
    exact = [_exact_settings(each, ours["training"]["global_batch_size"]) for each in (saved, ours)]
    if any(each["--exact"] for each in exact):
        pairs |= {name: (was, exact[1][name]) for name, was in exact[0].items() if name in exact[1]}
    # Versions without the setting read names of special tokens as plain text.
    pairs["special-tokens"] = (saved.get("special_tokens", False), ours["special_tokens"])
    differences = [f"{name} was {was!r} and is {now!r}" for name, (was, now) in pairs.items() if was != now]
    if differences:
        raise CheckpointError(
            f"{folder} is of another run: {'; '.join(differences)}; use the same settings and data, or another --out"
        )
    if step > session.settings.training.steps:
        raise ConfigError(
            f"{folder} has done {step} steps already, more than training.steps {session.settings.training.steps}"
        )
    return step


def _held_out(settings: Mapping[str, Any], folder: Path) -> str:
    """Return the setting that determines which part of the data is not trained on."""
    if settings.get("samples", {}).get("held_out"):
        return "--held-out"
    fraction = settings.get("corpus", {}).get("held_out_fraction", CorpusSettings.held_out_fraction)
    if not isinstance(fraction, int | float):
        raise CheckpointError(f"{folder} is damaged: its corpus.held_out_fraction is {shown(fraction)}, not a number")
    return f"corpus.held-out-fraction {fraction:g}"


def _exact_settings(settings: Mapping[str, Any], batch: int) -> dict[str, Any]:
    """Return the settings, by flag, that determine the bits of an exact run with ``batch`` samples per step.

    Exact runs fix the other settings.
    """
    parallel, training = settings.get("parallel", {}), settings.get("training", {})
    # Versions without the setting had no exact runs.
    found = {"--exact": parallel.get("exact", False), "--training.dtype": training.get("dtype")}
    if found["--exact"]:
        parts, size = parallel.get("exact_parts"), training.get("micro_batch_size")
        if size is None and type(parts) is int and parts > 0:
            size = micro_batch_size_of_parts(batch, parts)
        found |= {"--exact-parts": parts, "--training.micro-batch-size": size}
    return found
