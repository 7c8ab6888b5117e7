"""``shardwise generate``: continue a text with a trained checkpoint, split over any number of ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import tyro

from shardwise.cli.arguments import SplitArguments
from shardwise.training.bounds import SEED, Folder, Range


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
    max_new_tokens: Annotated[int | None, Range(0, 10**9)] = None
    temperature: Annotated[float | None, Range(0, 1e6)] = None
    top_k: Annotated[int | None, Range(0, 10**9)] = None
    top_p: Annotated[float | None, Range(0, 1, low_included=False)] = None
    seed: Annotated[int, SEED] = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    layers: Literal["auto", "training", "inference", "fused"] = "auto"


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
        from shardwise.cli.generating import prepare

        prepare(self, world_size)

    def work(self) -> Callable[[], object]:
        """Generate."""
        from shardwise.cli.generating import generate_text

        return partial(generate_text, self)
