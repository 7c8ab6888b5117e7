"""``shardwise classify``: say what the labels of texts are, split over any number of ranks."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import tyro

from shardwise.cli.arguments import SplitArguments
from shardwise.cli.reporting import print_note
from shardwise.training.bounds import BATCH, Folder
from shardwise.training.setting_groups import SEQUENCE


@dataclass(frozen=True)
class ClassifyArguments(SplitArguments):
    """Label texts with a model that has a head for it, such as shardwise finetune --task sequence-classification makes.

    Prints a line of JSON for each text, as the pipeline of transformers answers: {"label": ..., "score": ...}; of a
    model of several labels a list of those that are likelier than not, of a regression {"scores": [...]}, and of a
    model that labels words (--task token-classification) a list of {"word": ..., "label": ..., "score": ...}, with null
    of words that were cut off. Texts are cut into words at blanks.

    Attributes:
        checkpoint: Hugging Face folder, or adapters, with the model that they name, or an import.
        text: texts to label; if there are none, and no data, each line of standard input is one.
        data: files and folders of records with a text and, for two texts, text_pair, or with tokens, a list of words,
            in the forms that shardwise finetune reads.
        adapter: folder of adapters (LoRA, in the files of the peft library) to use with the model.
        sequence_length: most tokens of a text, which loses its end otherwise; 512, or the model's longest if that is
            less, if not given.
        batch_size: texts at once.
        special_tokens: read the names of special tokens in texts as these tokens.
        text_key: field of a record that holds the text, or the words.
        device: where to compute; "auto" takes a GPU if there is one for each rank.
    """

    checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT"), Folder("")]
    text: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    adapter: Annotated[str | None, Folder()] = None
    sequence_length: Annotated[int | None, SEQUENCE] = None
    batch_size: Annotated[int, BATCH] = 8
    special_tokens: bool = True
    text_key: str = "text"
    device: Literal["auto", "cpu", "cuda"] = "auto"

    def prepare(self, world_size: int) -> None:
        """Open the model."""
        from shardwise.run.commands.label_texts import open_classifier

        open_classifier(self.checkpoint, self.adapter, world_size)

    def work(self) -> Callable[[], object]:
        """Label."""
        from shardwise.run import classify

        lines = None if self.text or self.data else sys.stdin
        note = partial(print_note, "note")
        return partial(classify, **self.keywords(), lines=lines, on_answer=_print_answer, on_note=note)


def _print_answer(answer: object) -> None:
    print(json.dumps(answer, ensure_ascii=False), flush=True)
