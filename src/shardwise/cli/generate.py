"""``shardwise generate``: continue a text with a trained checkpoint, split over any number of ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from shardwise.cli.arguments import SplitArguments
from shardwise.cli.reporting import print_note
from shardwise.training.bounds import SEED, STEPS, TEMPERATURE, TOP_P, Folder

if TYPE_CHECKING:
    from shardwise.run.commands.text_generation import ChoiceWishes


@dataclass(frozen=True)
class GeneratingArguments(SplitArguments):
    """What every command is told that lets a model write.

    Attributes:
        checkpoint: folder of a run or an import, for its newest checkpoint, or of one of its checkpoints; or a Hugging
            Face folder, a fine-tuned one included; or adapters, with the model that they name.
        adapter: folder of adapters (LoRA, in the files of the peft library) to use with the model.
        max_new_tokens: most tokens to add. Here and below, if not given: what the model's generation_config.json says,
            or else 200.
        temperature: under 1 favours likely tokens; 0 always takes the likeliest. If not given: see above, or else 0.8.
        top_k: choose among this many likeliest tokens; 0 is off. If not given: see above, or else 50.
        top_p: choose among the fewest likeliest tokens whose probabilities reach this sum; 1 is off. If not given: see
            above, or else 1.
        seed: of the choices.
        device: where to compute; "auto" takes a GPU if there is one for each rank.
        layers: those of training; those for inference; or these "fused", with one exchange per half block. "auto" takes
            those for inference where the model can have them, which are the fastest where this was measured.
    """

    checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT"), Folder("")]
    adapter: Annotated[str | None, Folder()] = None
    max_new_tokens: Annotated[int | None, STEPS] = None
    temperature: Annotated[float | None, TEMPERATURE] = None
    top_k: Annotated[int | None, STEPS] = None
    top_p: Annotated[float | None, TOP_P] = None
    seed: Annotated[int, SEED] = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    layers: Literal["auto", "training", "inference", "fused"] = "auto"

    def wishes(self) -> "ChoiceWishes":
        """How tokens are to be chosen. Imported only here, because PyTorch takes seconds."""
        from shardwise.run.commands.text_generation import ChoiceWishes

        return ChoiceWishes(self.max_new_tokens, self.temperature, self.top_k, self.top_p)


@dataclass(frozen=True)
class GenerateArguments(GeneratingArguments):
    """Continue a text with a model of shardwise train, demo, finetune or import-hf, or in a Hugging Face folder.

    The same seed gives the same text on every number of ranks.

    Attributes:
        prompt: text to continue; a new text begins if it is empty.
        special_tokens: read the names of special tokens in the prompt, such as <|im_start|>, as these tokens, as
            transformers does; as letters with --no-special-tokens, for text of people whom you don't trust.
    """

    prompt: str = ""
    special_tokens: bool = True

    def prepare(self, world_size: int) -> None:
        """Open the checkpoint, and read the prompt."""
        from shardwise.run.commands.text_generation import open_prompt

        special = self.special_tokens
        open_prompt(
            self.checkpoint, self.adapter, self.prompt, self.wishes(), special_tokens=special, world_size=world_size
        )

    def work(self) -> Callable[[], object]:
        """Generate."""
        from shardwise.cli import streams
        from shardwise.run import generate

        streams.allow_any_character()
        note = partial(print_note, "shardwise generate")
        return partial(generate, **self.keywords(), on_text=streams.show, on_note=note)
