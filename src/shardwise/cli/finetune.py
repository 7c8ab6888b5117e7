"""``shardwise finetune``: from a Hugging Face folder to a fine-tuned one or its adapters, on any number of ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import tyro

from shardwise.cli.arguments import RunArguments
from shardwise.cli.streams import allow_any_character, has_colours
from shardwise.run.settings.finetune_settings import FinetuneSettings
from shardwise.training.bounds import Range


@dataclass(frozen=True, kw_only=True)
class FinetuneArguments(RunArguments):
    """Fine-tune a Hugging Face model on your chats, instructions or texts, or to label texts.

    All of its weights are trained, or low-rank adapters (LoRA) beside them. OUT
    becomes a Hugging Face folder, or an adapter folder of the peft library.
    Settings come from their defaults, then from the TOML file of --config, then
    from flags:
      shardwise finetune MODEL_DIR --data chats.jsonl --out OUT --epochs 3 --tp 2
      shardwise finetune MODEL_DIR --data FOLDER --out OUT --tp 2 --lora-rank 8
      shardwise finetune MODEL_DIR --data labelled.jsonl --out OUT --task sequence-classification
      shardwise finetune MODEL_DIR --data tagged.jsonl --out OUT --task token-classification
      shardwise finetune MODEL_DIR --data chats.jsonl --show 3

    Attributes:
        show: print so many samples as the model would see them, what is learned of them in colour, and train nothing.
    """

    settings: Annotated[FinetuneSettings, tyro.conf.arg(name="")]
    show: Annotated[int, Range(0, 1_000_000)] = 0

    @property
    def num_ranks(self) -> int:
        """One for each part of the model; one to show samples."""
        return 1 if self.show else super().num_ranks

    def check_world(self, world_size: int) -> None:
        """See ``RunSettings.check_world``; samples are shown whatever the ranks."""
        if not self.show:
            super().check_world(world_size)

    def check(self) -> None:
        """See ``RunArguments.check``; nothing is written to show samples."""
        if not self.show:
            super().check()

    def way_on(self) -> str:
        """See ``RunArguments.way_on``; to show samples begins anew as it is."""
        return "" if self.show else super().way_on()

    def work(self) -> Callable[[], object]:
        """Fine-tune, or show."""
        if self.show:
            return partial(_print_samples, self.settings, self.show)
        from shardwise.run.commands.trainings import run_settings

        return partial(run_settings, self.settings)


def _print_samples(settings: FinetuneSettings, count: int) -> None:
    from shardwise.run.commands.shown_samples import shown_samples

    allow_any_character()
    for paragraph in shown_samples(settings, count, colours=has_colours()):
        print(paragraph)
