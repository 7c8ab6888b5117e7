"""``shardwise import-hf`` and ``export-hf``, which convert a Hugging Face folder to a checkpoint and back."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from shardwise.cli.arguments import SplitArguments, check_model
from shardwise.cli.reporting import is_first_rank, print_note
from shardwise.core.folder_lock import check_free, check_free_target
from shardwise.training.bounds import DEFAULT_FILE_GB, FILE_GB, Folder


@dataclass(frozen=True)
class ImportArguments(SplitArguments):
    """Make a checkpoint from a model in Hugging Face's layout (config.json and safetensors), or from a GGUF file.

    shardwise generate reads the checkpoint at any layout, and so do programs through shardwise.storage.checkpoint.
    To train a model from a Hugging Face folder, use shardwise finetune, which needs no import.

    Attributes:
        folder: folder or GGUF file of the model; docs/huggingface.md lists the supported architectures.
        out: folder for the checkpoint, which must not contain one yet.
        dtype: dtype of the weights; the model's own if not given.
    """

    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER"), Folder("")]
    out: Annotated[str, Folder()]
    dtype: Literal["float32", "float64", "bfloat16", "float16"] | None = None

    def begins(self) -> str:
        return f"reading {self.folder}"

    def check(self) -> None:
        check_free(Path(self.out))
        check_model(self.folder)

    def prepare(self, world_size: int) -> None:
        from shardwise.run.commands.conversion import open_for_import

        open_for_import(self.folder, self.out, world_size)

    def work(self) -> None:
        from shardwise.run import import_hf

        imported = import_hf(**self.keywords())
        if is_first_rank():
            use = f"; continue a text with: shardwise generate {self.out}" if imported.can_generate else ""
            print(f"wrote {imported.checkpoint}{use}")
            if imported.note:
                print_note("shardwise import-hf", imported.note)


@dataclass(frozen=True)
class ExportArguments(SplitArguments):
    """Write a checkpoint's model and tokenizer in Hugging Face's layout, which transformers loads unchanged.

    With --merge, write the base model of adapters, with the adapters merged into its weights:
      shardwise export-hf adapters --out merged --merge

    Attributes:
        checkpoint: folder of a run or an import (its newest checkpoint is used), or of one checkpoint; with merge,
            folder of adapters.
        out: folder to write, which must be empty or not exist.
        dtype: dtype of the weights; the checkpoint's own if not given.
        architecture: model_type to write, such as "mistral"; if not given, the one that was imported, or else the first
            that fits (llama or gpt2 for a training run).
        expert_names: names of experts: "separate" for a tensor for each, or "fused" for one for all experts of a layer,
            which transformers 5 reads too; if not given, the form that transformers writes.
        max_file_gb: largest size of a file of weights, in 1e9 bytes.
        merge: read checkpoint as a folder of adapters, which names its base model, and write the merged model.
    """

    checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT"), Folder("")]
    out: Annotated[str, Folder()]
    dtype: Literal["float32", "float64", "bfloat16", "float16"] | None = None
    architecture: str | None = None
    expert_names: Literal["separate", "fused"] | None = None
    max_file_gb: Annotated[float, FILE_GB] = DEFAULT_FILE_GB
    merge: bool = False

    def begins(self) -> str:
        return f"reading {self.checkpoint}"

    def check(self) -> None:
        check_free_target(Path(self.out))
        check_model(self.checkpoint, "give the --out of a training run or one of its checkpoints")

    def prepare(self, world_size: int) -> None:
        from shardwise.run.commands.conversion import open_for_export

        open_for_export(self.checkpoint, self.out, merge=self.merge, world_size=world_size)

    def work(self) -> None:
        from shardwise.run import export_hf

        export_hf(**self.keywords())
        if is_first_rank():
            print(f"wrote {self.out}; transformers loads it: AutoModel*.from_pretrained({self.out!r})")
