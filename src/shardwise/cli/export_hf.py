"""``shardwise export-hf``: a checkpoint becomes a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from shardwise.cli.arguments import SplitArguments, parse_command
from shardwise.cli.checkpoint_model import OpenCheckpoint, is_pretrained, open_checkpoint
from shardwise.cli.start import run_in_ranks
from shardwise.errors import ConfigError
from shardwise.folder_lock import check_free_target
from shardwise.training.bounds import Range, resolve_paths_


@dataclass(frozen=True)
class ExportArguments(SplitArguments):
    """Write a checkpoint's model in Hugging Face's layout, with its tokenizer: transformers loads it unchanged.

    Attributes:
        checkpoint: folder of a run or an import, for its newest checkpoint, or of one of its checkpoints.
        out: folder to write, which must not exist or be empty.
        dtype: of the weights; the checkpoint's own if not given.
        architecture: model_type to write, such as "mistral"; the one that it was imported from, or else the first that
            fits (llama or gpt2 for a training run), if not given.
        max_file_gb: largest file of weights, in 1e9 bytes.
    """

    checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    out: str
    dtype: Literal["float32", "float64", "bfloat16", "float16"] | None = None
    architecture: str | None = None
    max_file_gb: Annotated[float, Range(1e-9, 1e9)] = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        resolve_paths_(self, "checkpoint")
        resolve_paths_(self, "out", prefix="--")


def main(argv: list[str]) -> int:
    """Export, here if this process is a rank or the only one, else in ranks that this process starts.

    Args:
        argv: the arguments after ``export-hf``.

    Returns:
        The exit code.

    Raises:
        ConfigError: a flag out of range, a model that Hugging Face has no architecture for, ``--out`` exists.
        CheckpointError: no checkpoint, or a damaged one; the folder cannot be written.
    """
    arguments = parse_command(ExportArguments, argv, "shardwise export-hf")
    return run_in_ranks(
        "export-hf",
        argv,
        arguments,
        lambda: _export(arguments),
        check=lambda: check_free_target(Path(arguments.out)),
        prepare=lambda world_size: _open(arguments, world_size),
    )


def _export(arguments: ExportArguments) -> None:
    import torch

    from shardwise.communication.agreement import agree
    from shardwise.huggingface import save_pretrained
    from shardwise.training.ranks import open_ranks

    with open_ranks("cpu", timeout=arguments.timeout) as ranks:
        opened = agree(lambda: _open(arguments, ranks.world_size), group=ranks.control)
        save_pretrained(
            opened.load_model(ranks),
            arguments.out,
            source=opened.folder,
            architecture=arguments.architecture,
            dtype=None if arguments.dtype is None else getattr(torch, arguments.dtype),
            max_file_size=int(arguments.max_file_gb * 1e9),
            fields=_fields(opened),
        )
        if ranks.is_first:
            print(f"wrote {arguments.out}; transformers loads it: AutoModel*.from_pretrained({arguments.out!r})")


def _open(arguments: ExportArguments, world_size: int) -> OpenCheckpoint:
    from shardwise.huggingface.saving import check_target

    path = Path(arguments.checkpoint)
    if is_pretrained(path):
        raise ConfigError(f"{path} is a Hugging Face folder already; give the --out of a training run or an import")
    opened = open_checkpoint(path)
    opened.check_fits(world_size)
    check_target(Path(arguments.out))
    return opened


def _fields(opened: OpenCheckpoint) -> dict[str, Any]:
    """What a run knows beside its model: which token ends a text, and so begins one."""
    if opened.config is not None or opened.tokenizer is None:
        return {}
    return {"bos_token_id": opened.tokenizer.eos_id, "eos_token_id": opened.tokenizer.eos_id}
