"""A sample of what the model writes, for a person to look at."""

from __future__ import annotations

from shardwise.inference.generation import generate
from shardwise.inference.sampling import Sampling
from shardwise.models.gpt import GPT
from shardwise.training.session import Session

_SAMPLING = Sampling(temperature=0.7, top_k=40)


def sample_text(session: Session, *, max_new_tokens: int) -> str:
    """A new text as the model, of one stage, begins it; every rank calls and gets the same."""
    texts, model = session.texts, session.trainer.model
    assert isinstance(model, GPT)
    new_ids = generate(
        model,
        texts.tokenizer.beginning,
        max_new_tokens=max_new_tokens,
        sampling=_SAMPLING,
        seed=session.settings.training.seed,
        eos_id=texts.tokenizer.eos_id,
    )
    return texts.tokenizer.decode(new_ids)
