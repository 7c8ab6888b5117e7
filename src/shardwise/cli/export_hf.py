"""``shardwise export-hf``: a checkpoint becomes a Hugging Face folder."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import tyro

from shardwise.cli.arguments import SplitArguments
from shardwise.cli.rank import is_first_rank
from shardwise.core.folder_lock import check_free_target
from shardwise.training.bounds import FILE_GB, Folder


@dataclass(frozen=True)
class ExportArguments(SplitArguments):
    """Write a checkpoint's model in Hugging Face's layout, with its tokenizer: transformers loads it unchanged.

    With --merge the model of adapters, with these merged into its weights:
      shardwise export-hf adapters --out merged --merge

    Attributes:
        checkpoint: folder of a run or an import, for its newest checkpoint, or of one of its checkpoints; with merge of
            adapters.
        out: folder to write, which must not exist or be empty.
        dtype: of the weights; the checkpoint's own if not given.
        architecture: model_type to write, such as "mistral"; the one that it was imported from, or else the first that
            fits (llama or gpt2 for a training run), if not given.
        max_file_gb: largest file of weights, in 1e9 bytes.
        merge: checkpoint is a folder of adapters, which names the model's folder; write that with them merged.
    """

    checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT"), Folder("")]
    out: Annotated[str, Folder()]
    dtype: Literal["float32", "float64", "bfloat16", "float16"] | None = None
    architecture: str | None = None
    max_file_gb: Annotated[float, FILE_GB] = 5.0
    merge: bool = False

    def check(self) -> None:
        """Raise ConfigError if ``out`` cannot be written to."""
        check_free_target(Path(self.out))

    def prepare(self, world_size: int) -> None:
        """Open the checkpoint."""
        from shardwise.run.commands.conversion import open_for_export

        open_for_export(self.checkpoint, self.out, merge=self.merge, world_size=world_size)

    def work(self) -> Callable[[], object]:
        """Export."""
        from shardwise.run import export_hf

        return partial(_export, partial(export_hf, **self.keywords()), self.out)


def _export(export: Callable[[], object], out: str) -> None:
    export()
    if is_first_rank():
        print(f"wrote {out}; transformers loads it: AutoModel*.from_pretrained({out!r})")
