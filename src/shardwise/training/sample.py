"""A sample of what the model writes, for a person to look at."""

from __future__ import annotations

import dataclasses

from shardwise.inference.generation import generate
from shardwise.inference.sampling import Sampling
from shardwise.training.build import build_model
from shardwise.training.session import Session
from shardwise.training.settings import ParallelSettings

_SAMPLING = Sampling(temperature=0.7, top_k=40)


def sample_text(session: Session, *, max_new_tokens: int) -> str:
    """A new text as the model begins it; every rank calls and gets the same."""
    trainer, texts = session.trainer, session.texts
    model = trainer.model
    if model.sequence_parallel:
        # One token cannot be split along the sequence; the same weights can do without.
        model = build_model(
            dataclasses.replace(session.settings, parallel=ParallelSettings(tp=session.settings.parallel.tp)),
            texts.tokenizer.vocab_size,
            pg_collection=model.pg_collection,
            device=session.ranks.device,
        )
        model.load_state_dict(trainer.model.state_dict())
    new_ids = generate(
        model,
        [],
        max_new_tokens=max_new_tokens,
        sampling=_SAMPLING,
        seed=session.settings.training.seed,
        eos_id=texts.tokenizer.eos_id,
    )
    return texts.tokenizer.decode(new_ids)
