"""Pretraining, fine-tuning and DPO as functions with keyword arguments."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

from shardwise.run.run import run
from shardwise.run.settings import DpoSettings, FinetuneSettings, RunSettings, Settings
from shardwise.run.tasks.task import Outcome
from shardwise.training.bounds import from_keywords, launcher_number

_Paths = str | PathLike[str] | Sequence[str | PathLike[str]]


def train(data: _Paths, *, out: str | PathLike[str] = Settings.out, **settings: Any) -> Outcome:
    """Train a GPT on text; every rank calls. The output is that of ``shardwise train``.

    Args:
        data: file or folder, or several; "stdlib" is this machine's Python standard library.
        out: folder for checkpoints, metrics, pictures and the tokenizer.
        settings: settings of ``shardwise train --help``, named as in its TOML file: ``model={"num_layers": 2}`` for
            ``--model.num-layers 2``, ``resume="auto"`` for ``--resume auto``.

    Returns:
        Losses and the last checkpoint, on every rank.

    Raises:
        ConfigError: a setting is unknown or out of range, or settings contradict each other or the number of ranks.
        ShardwiseError: any other failure, on every rank.
    """
    return _run(from_keywords(Settings, settings | {"data": data, "out": out}))


def finetune(
    base: str | PathLike[str], data: _Paths, *, out: str | PathLike[str] = FinetuneSettings.out, **settings: Any
) -> Outcome:
    """Fine-tune a Hugging Face model on chats, instructions or texts; every rank calls.

    Args:
        base: Hugging Face folder to start from.
        data: file or folder, or several.
        out: folder for the fine-tuned model or its adapters, for checkpoints, metrics and pictures.
        settings: settings of ``shardwise finetune --help``: ``lora_rank=8`` for ``--lora-rank 8``, ``training={"steps":
            100}`` for ``--training.steps 100``.

    Returns:
        Losses and the last checkpoint, on every rank.

    Raises:
        ConfigError: see ``train``.
        ShardwiseError: any other failure, on every rank.
    """
    return _run(from_keywords(FinetuneSettings, settings | {"base": base, "data": data, "out": out}))


def dpo(
    base: str | PathLike[str], data: _Paths, *, out: str | PathLike[str] = DpoSettings.out, **settings: Any
) -> Outcome:
    """Fine-tune a Hugging Face model on pairs of a better and a worse answer; every rank calls.

    Args:
        base: see ``finetune``.
        data: file or folder, or several, of records with a prompt, a chosen and a rejected answer.
        out: see ``finetune``.
        settings: settings of ``shardwise dpo --help``: ``beta=0.2`` for ``--beta 0.2``.

    Returns:
        Losses and the last checkpoint, on every rank.

    Raises:
        ConfigError: see ``train``.
        ShardwiseError: any other failure, on every rank.
    """
    return _run(from_keywords(DpoSettings, settings | {"base": base, "data": data, "out": out}))


def _run(settings: RunSettings) -> Outcome:
    settings.check_world(launcher_number("WORLD_SIZE", least=1) or 1)
    return run(settings)
