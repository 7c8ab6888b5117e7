"""``shardwise finetune``: from a Hugging Face folder to a fine-tuned one or its adapters, on any number of ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import tyro

from shardwise.cli.arguments import RunArguments
from shardwise.training.finetune_settings import FinetuneSettings


@dataclass(frozen=True, kw_only=True)
class FinetuneArguments(RunArguments):
    """Fine-tune a Hugging Face model on your text.

    All of its weights are trained, or low-rank adapters (LoRA) beside them. OUT
    becomes a Hugging Face folder, or an adapter folder of the peft library.
    Settings come from their defaults, then from the TOML file of --config, then
    from flags:
      shardwise finetune MODEL_DIR --data FOLDER --out OUT --tp 2
      shardwise finetune MODEL_DIR --data FOLDER --out OUT --tp 2 --lora-rank 8
    """

    settings: Annotated[FinetuneSettings, tyro.conf.arg(name="")]

    def work(self) -> Callable[[], object]:
        """Fine-tune."""
        from shardwise.training.finetune import Finetuning
        from shardwise.training.run import run

        return partial(run, self.settings, Finetuning)
