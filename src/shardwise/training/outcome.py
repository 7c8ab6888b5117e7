"""What a run came to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Outcome:
    """What a run came to; the same on every rank.

    Attributes:
        first_loss: of the first step that this process did, in nats per token; None if there was none to do.
        last_loss: of the last step; None likewise.
        held_out_bits_per_byte: at the end.
        seconds: spent in training steps.
        collectives_per_step: collectives that a rank launches in a step.
        bytes_per_step: bytes that a rank contributes to them.
        checkpoint: the last one.
        references: bits per byte of general-purpose compressors on the same held-out text, by name.
        notes: what could not be done, one line each; each rank has its own.
    """

    first_loss: float | None
    last_loss: float | None
    held_out_bits_per_byte: float
    seconds: float
    collectives_per_step: int
    bytes_per_step: int
    checkpoint: Path
    references: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
