"""``shardwise import-hf``: a Hugging Face folder becomes a checkpoint."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from shardwise.cli.arguments import SplitArguments, parse_command
from shardwise.cli.checkpoint_model import TO_BRING_A_TOKENIZER
from shardwise.cli.reporting import print_line
from shardwise.cli.start import run_in_ranks
from shardwise.errors import ConfigError, DataError
from shardwise.folder_lock import check_free
from shardwise.training.bounds import resolve_paths_

if TYPE_CHECKING:
    from shardwise.huggingface.folder import PretrainedFolder


@dataclass(frozen=True)
class ImportArguments(SplitArguments):
    """Make a checkpoint of a model in Hugging Face's layout (config.json and safetensors).

    shardwise generate reads it, and programs through shardwise.checkpoint, at any layout. (To train further from a
    Hugging Face folder there is shardwise finetune, which needs no import.)

    Attributes:
        folder: of the model: GPT-2, BLOOM, Llama, Mistral, Qwen 2, Qwen 3 or BERT.
        out: folder for the checkpoint, which must not have one yet.
        dtype: of the weights; the model's own if not given.
    """

    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    out: str
    dtype: Literal["float32", "float64", "bfloat16", "float16"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        resolve_paths_(self, "folder")
        resolve_paths_(self, "out", prefix="--")


def main(argv: list[str]) -> int:
    """Import, here if this process is a rank or the only one, else in ranks that this process starts.

    Args:
        argv: the arguments after ``import-hf``.

    Returns:
        The exit code.

    Raises:
        ConfigError: a flag, an architecture or a value in ``config.json`` that cannot be; ``--out`` has a checkpoint.
        CheckpointError: the folder's files are not what its ``config.json`` says, or nothing can be written.
    """
    arguments = parse_command(ImportArguments, argv, "shardwise import-hf")
    return run_in_ranks(
        "import-hf",
        argv,
        arguments,
        lambda: _run_rank(arguments),
        check=lambda: check_free(Path(arguments.out)),
        prepare=lambda world_size: _open(arguments, world_size),
    )


def _run_rank(arguments: ImportArguments) -> None:
    from shardwise.training.out_folder import hold_folder
    from shardwise.training.ranks import open_ranks

    with open_ranks("cpu", timeout=arguments.timeout) as ranks, hold_folder(Path(arguments.out), ranks):
        path, kind, lack = _import(arguments, ranks.world_size)
        if ranks.is_first:
            generates = kind == "gpt" and lack is None
            use = f"; continue a text with: shardwise generate {arguments.out}" if generates else ""
            print(f"wrote {path}{use}")
            if lack is not None:
                print_line(f"shardwise import-hf: {_what_it_means(lack, kind)}")


def _open(arguments: ImportArguments, world_size: int) -> PretrainedFolder:
    from shardwise.checkpoint import latest
    from shardwise.huggingface.folder import PretrainedFolder

    source = PretrainedFolder(arguments.folder)
    heads = source.description.num_attention_heads
    if world_size > heads:
        raise ConfigError(
            f"the model's {heads} attention heads cannot be split over {world_size} ranks; use --nproc {heads} or less"
        )
    if latest(_checkpoints(arguments)) is not None:
        raise ConfigError(f"{arguments.out} has a checkpoint already; choose another --out")
    return source


def _checkpoints(arguments: ImportArguments) -> Path:
    return Path(arguments.out) / "checkpoints"


def _what_it_means(lack: str, kind: str) -> str:
    """What to say of a checkpoint without a tokenizer, ``lack`` being why."""
    means = "shardwise generate cannot use it, and exports have no tokenizer" if kind == "gpt" else "exports have none"
    return f"the checkpoint has no tokenizer, so that {means} ({lack}); {TO_BRING_A_TOKENIZER}, and import it again"


def _import(arguments: ImportArguments, world_size: int) -> tuple[Path, str, str | None]:
    """The checkpoint, the kind of model that it is of, and why it has no tokenizer, if it has none."""
    import torch
    import torch.distributed as dist

    from shardwise import checkpoint
    from shardwise.communication.agreement import agree
    from shardwise.huggingface import load_pretrained
    from shardwise.huggingface.pretrained import CONFIG_NAME
    from shardwise.huggingface.saving import COPIED_FILES
    from shardwise.sharded_state import sharded_state_dict
    from shardwise.topology import Groups

    world = dist.group.WORLD
    assert world is not None
    source = agree(lambda: _open(arguments, world_size), group=world)
    dtype = source.dtype if arguments.dtype is None else getattr(torch, arguments.dtype)
    model = load_pretrained(arguments.folder, groups=Groups(tp=world), dtype=dtype, device="cpu")
    # What the heads found in the files add to config.json is in the class that it names.
    config = dict(source.config.values) | {
        "architectures": [source.architecture.class_of(source.description)],
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    config.pop("dtype", None)

    def copy_files(folder: Path) -> None:
        for name in (CONFIG_NAME, *COPIED_FILES):
            if (source.path / name).is_file():
                shutil.copyfile(source.path / name, folder / name)

    identity, lack = _tokenizer_identity(source.path)
    path = checkpoint.save(
        _checkpoints(arguments),
        0,
        sharded_state_dict(model, "model.", group=world),
        {"huggingface": {"config": config}, **identity},
        group=world,
        extra_files=copy_files,
    )
    return path, source.description.kind, lack


def _tokenizer_identity(folder: Path) -> tuple[dict[str, Any], str | None]:
    """What checkpoints record of the tokenizer; nothing, and why, if there is none that can be read."""
    from shardwise.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer.load(folder)
    except DataError as error:
        return {}, str(error)
    return {"tokenizer_sha256": tokenizer.sha256, "vocab_size": tokenizer.vocab_size}, None
