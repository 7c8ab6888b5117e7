"""Preferences from ``--data`` to pairs: split, encoded, fitted to the sequence length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.data import EvaluationPairs, Example, PairDataset, PreferenceEncoder, SampleLoader
from shardwise.data.encoding import UnusableExampleError, common_length
from shardwise.data.labelled import counted
from shardwise.data.tokenizer import Tokenizer
from shardwise.run.settings.finetune_settings import SampleSettings
from shardwise.run.tasks.samples import LOOKED_AT, encode_parts, template_digest
from shardwise.training.settings import RunSettings


@dataclass(frozen=True)
class Pairs:
    """Pairs of answers that a run trains and measures on.

    Attributes:
        name: what people call them.
        sha256: hex digest of the records.
        tokenizer: of the model.
        train, held_out: pairs to train and to measure on.
        notes: what was left out or cut, and why.
        identity: how records became pairs.
        held_out_bytes: nothing; no compressor prefers an answer.
        bits_per_nat: 0; a loss of pairs is none of bytes.
    """

    name: str
    sha256: str
    tokenizer: Tokenizer
    train: PairDataset
    held_out: PairDataset
    notes: tuple[str, ...]
    identity: Mapping[str, Any]
    held_out_bytes: bytes = b""
    bits_per_nat: float = 0.0

    def loader(self, settings: RunSettings) -> SampleLoader:
        """The training batches."""
        return SampleLoader(self.train, settings.training.global_batch_size, settings.training.seed)

    def windows(self, settings: RunSettings) -> EvaluationPairs:
        """The held-out pairs."""
        return EvaluationPairs(self.held_out)


def prepare_pairs(
    name: str,
    examples: Sequence[Example],
    held_out: Sequence[Example] | None,
    encoder: PreferenceEncoder,
    settings: SampleSettings,
    *,
    sequence_length: int,
    held_out_fraction: float,
) -> Pairs:
    """Split and encode, or take from the cache what an earlier run left; arguments and errors: ``prepare_samples``."""
    parts = encode_parts(name, examples, held_out, encoder, held_out_fraction)
    notes, datasets = [*parts.notes, *_notes_on_prompts(encoder, examples)], []
    assert settings.too_long != "split"
    for samples, what in zip(parts.samples, ("to train on", "held out"), strict=True):
        dataset = PairDataset(
            samples, sequence_length, too_long=settings.too_long, beginning=encoder.tokenizer.beginning
        )
        datasets.append(dataset)
        if dataset.num_too_long:
            past = "cut" if settings.too_long == "cut" else "dropped"
            notes.append(
                f"{dataset.num_too_long} of {counted(len(samples) // 2, 'pair')} {what} {past}, as they are longer "
                f"than {sequence_length + 1} tokens (--too-long, --model.sequence-length)"
            )
        if dataset.num_equal:
            notes.append(f"{counted(dataset.num_equal, 'pair')} {what} left out since the cut leaves no difference")
    train, measured = datasets
    identity = {"too_long": settings.too_long, "chat_template_sha256": template_digest(encoder)}
    shown = f"{name}, {counted(len(examples), 'pair')}"
    return Pairs(shown, parts.sha256, encoder.tokenizer, train, measured, tuple(dict.fromkeys(notes)), identity)


def _notes_on_prompts(encoder: PreferenceEncoder, examples: Sequence[Example]) -> list[str]:
    """What the first pairs say of prompts that do not end where a token does."""
    for example in examples[:LOOKED_AT]:
        try:
            chosen, _ = encoder.encode_all(example)
            alone = encoder.prompt_of(example)
        except UnusableExampleError:
            continue
        if common_length(alone, chosen.ids[~chosen.learned].tolist()) < len(alone):
            return [
                f"the last tokens of a prompt are others once an answer follows (first: {example.where}), and are "
                "compared as a part of the answer"
            ]
    return []
