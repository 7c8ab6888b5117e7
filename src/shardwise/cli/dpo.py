"""``shardwise dpo``: a Hugging Face model learns from preferences, on any number of ranks."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from shardwise.cli.finetune import FinetuneArguments
from shardwise.run.settings.finetune_settings import DpoSettings


@dataclass(frozen=True, kw_only=True)
class DpoArguments(FinetuneArguments):
    """Fine-tune a Hugging Face model on preferences: of two answers, the better one.

    Direct preference optimization (DPO) and its kin. A record has a prompt, a
    chosen and a rejected answer, as texts or as messages. What the model that
    training begins with says of them is computed once and kept in OUT. All else
    is as in shardwise finetune:
      shardwise dpo MODEL_DIR --data pairs.jsonl --out OUT --epochs 1 --tp 2
      shardwise dpo MODEL_DIR --data pairs.jsonl --out OUT --lora-rank 8 --beta 0.1
      shardwise dpo MODEL_DIR --data pairs.jsonl --show 3

    Attributes:
        show: print so many pairs as the model would see them, the answers in colour, and train nothing.
    """

    settings: Annotated[DpoSettings, tyro.conf.arg(name="")]
