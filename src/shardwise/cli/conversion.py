"""``shardwise import-hf``, ``import-megatron`` and ``export-hf``, from foreign folders and back; and ``tokenize``."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from shardwise.cli.arguments import Arguments, SplitArguments, check_data, check_file, check_model
from shardwise.cli.reporting import is_first_rank, print_note
from shardwise.core.folder_lock import check_free, check_free_target
from shardwise.training.bounds import DEFAULT_FILE_GB, FILE_GB, Folder, Range


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
    command: ClassVar[str] = "import-hf"

    def begins(self) -> str:
        return f"reading {self.folder}"

    def check_early(self) -> None:
        check_free(Path(self.out))
        check_model(self.folder)

    def prepare(self, world_size: int) -> None:
        from shardwise.run.commands.conversion import open_for_import

        open_for_import(self.folder, self.out, world_size)

    def work(self) -> None:
        from shardwise import run

        imported = getattr(run, self.command.replace("-", "_"))(**self.keywords())
        if is_first_rank():
            use = f"; continue a text with: shardwise generate {self.out}" if imported.can_generate else ""
            print(f"wrote {imported.checkpoint}{use}")
            if imported.note:
                print_note(f"shardwise {self.command}", imported.note)


@dataclass(frozen=True)
class ImportMegatronArguments(ImportArguments):
    """Make a checkpoint from a checkpoint of Megatron: torch_dist, or a file for each rank, at any layout.

    Pickles are read by a machine that knows a closed list of names and runs nothing. Put the model's tokenizer.json and
    tokenizer_config.json into the folder, so that shardwise generate finds them. shardwise finetune and generate also
    read the folder itself.

    Attributes:
        folder: folder of Megatron's checkpoints (its --save), or of one iteration.
        out: folder for the checkpoint, which must not contain one yet.
        dtype: dtype of the weights; params_dtype of the arguments if not given.
        optimizer: read the state of the optimizer too (dp_reshardable); weights are then its fp32 ones.
    """

    optimizer: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    command: ClassVar[str] = "import-megatron"

    def prepare(self, world_size: int) -> None:
        from shardwise.run.commands.conversion import check_megatron

        check_megatron(self.folder)
        super().prepare(world_size)


@dataclass(frozen=True)
class _FromCheckpoint(SplitArguments):
    """Arguments of the commands that write a checkpoint's model in another format."""

    checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT"), Folder("")]
    out: Annotated[str, Folder()]
    dtype: Literal["float32", "float64", "bfloat16", "float16"] | None = None

    def begins(self) -> str:
        return f"reading {self.checkpoint}"

    def check_early(self) -> None:
        check_free_target(Path(self.out))
        check_model(self.checkpoint, "give the --out of a training run or one of its checkpoints")


@dataclass(frozen=True)
class ExportArguments(_FromCheckpoint):
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

    architecture: str | None = None
    expert_names: Literal["separate", "fused"] | None = None
    max_file_gb: Annotated[float, FILE_GB] = DEFAULT_FILE_GB
    merge: bool = False

    def prepare(self, world_size: int) -> None:
        from shardwise.run.commands.conversion import open_for_export

        open_for_export(self.checkpoint, self.out, merge=self.merge, world_size=world_size)

    def work(self) -> None:
        from shardwise.run import export_hf

        export_hf(**self.keywords())
        if is_first_rank():
            print(f"wrote {self.out}; transformers loads it by from_pretrained({self.out!r})")


@dataclass(frozen=True)
class ExportMegatronArguments(_FromCheckpoint):
    """Write a checkpoint's model as a folder of Megatron's checkpoints (torch_dist), for any layout of Megatron.

    Attributes:
        checkpoint: folder of a run or an import (its newest checkpoint is used), or of one checkpoint.
        out: folder to write, which must be empty or not exist.
        dtype: dtype of the weights; the checkpoint's own if not given.
    """

    def prepare(self, world_size: int) -> None:
        from shardwise.run.commands.conversion import open_for_export

        open_for_export(self.checkpoint, self.out, merge=False, world_size=world_size)

    def work(self) -> None:
        from shardwise.run import export_megatron

        export_megatron(**self.keywords())
        if is_first_rank():
            print(f"wrote {self.out}; Megatron loads it: --load {self.out} --ckpt-format torch_dist")


@dataclass(frozen=True, kw_only=True)
class TokenizeArguments(Arguments):
    """Write the documents of files and folders as token files, OUT.bin and OUT.idx, in several processes.

    Each document ends with the end-of-text token. An ended command goes on if it is
    repeated. shardwise train --data OUT.idx reads the files, and so does Megatron.

    Attributes:
        data: files and folders of text, JSON lines, JSON arrays, Parquet or Arrow.
        tokenizer: tokenizer.json, or its folder.
        out: name of both files, without .bin and .idx.
        text_key: field of a JSON record that holds the text.
        special_tokens: parse the names of special tokens in the text, such as <|endoftext|>, as these tokens.
        workers: number of processes; if not given, one for each processor.
    """

    data: tuple[str, ...]
    tokenizer: str
    out: Annotated[str, Folder()]
    text_key: str = "text"
    special_tokens: bool = False
    workers: Annotated[int | None, Range(1, 1024)] = None

    def resume_hint(self) -> str:
        return "run the same command again to go on"

    def check_early(self) -> None:
        check_data(self.data)
        check_file(self.tokenizer, "--tokenizer")

    def work(self) -> None:
        from tqdm import tqdm

        from shardwise.run import tokenize

        names = (field.name for field in dataclasses.fields(self) if field.name != "debug")
        lasting = 0.5 if sys.stderr.isatty() else 5.0
        with tqdm(unit="B", unit_scale=True, mininterval=lasting, dynamic_ncols=True) as bar:

            def show(done: int, total: int, tokens: int) -> None:
                bar.total = total
                bar.set_postfix_str(f"{tokens / 1e6:,.1f} M tokens", refresh=False)
                bar.update(done - bar.n)

            done = tokenize(**{name: getattr(self, name) for name in names}, on_progress=show)
        resumed = f" ({done.num_resumed:,} of an earlier call)" if done.num_resumed else ""
        print(
            f"wrote {done.index}: {done.num_documents:,} documents{resumed}, {done.num_tokens:,} tokens; train with: "
            f"shardwise train --data {done.index} --corpus.tokenizer {self.tokenizer}"
        )
