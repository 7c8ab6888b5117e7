"""``shardwise distill``: a Hugging Face model learns from another one, on any number of ranks."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from shardwise.cli.finetune import FinetuneArguments
from shardwise.run.settings.finetune_settings import DistillSettings


@dataclass(frozen=True, kw_only=True)
class DistillArguments(FinetuneArguments):
    """Fine-tune a Hugging Face model on what another one of the same tokenizer predicts.

    The teacher is split over the same ranks and is not trained. All else is as in
    shardwise finetune:
      shardwise distill MODEL_DIR --teacher LARGE --data chats.jsonl --out OUT --tp 2
      shardwise distill MODEL_DIR --teacher LARGE --data FOLDER --out OUT --alpha 1
    """

    settings: Annotated[DistillSettings, tyro.conf.arg(name="")]
