"""``shardwise export-hf``: a checkpoint becomes a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from shardwise.cli.arguments import parse_command
from shardwise.cli.checkpoint_model import OpenCheckpoint, open_checkpoint
from shardwise.cli.launch import launch_ranks, shardwise_command
from shardwise.cli.rank import RankEnvironment, checked_world_size
from shardwise.folder_lock import check_free_target, checked_out
from shardwise.training.bounds import DEFAULT_TIMEOUT, LOCAL_RANKS, TIMEOUT, Range, check_values


@dataclass(frozen=True)
class ExportArguments:
    """Write a checkpoint's model in Hugging Face's layout, with its tokenizer: transformers loads it unchanged.

    Attributes:
        checkpoint: folder of a run or an import, for its newest checkpoint, or of one of its checkpoints.
        out: folder to write, which must not exist or be empty.
        dtype: of the weights; the checkpoint's own if not given.
        architecture: model_type to write, such as "mistral"; the one that it was imported from, or else the first that
            fits (llama or gpt2 for a training run), if not given.
        max_file_gb: largest file of weights, in 1e9 bytes.
        nproc: ranks on this machine that share the work; each holds its part of the model.
        timeout: seconds that a rank waits for another, before all end with an error that names it.
        debug: show stack traces, and the launcher's log.
    """

    checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    out: str
    dtype: Literal["float32", "float64", "bfloat16", "float16"] | None = None
    architecture: str | None = None
    max_file_gb: Annotated[float, Range(1e-9, 1e9)] = 5.0
    nproc: Annotated[int | None, LOCAL_RANKS] = None
    timeout: Annotated[float, TIMEOUT] = DEFAULT_TIMEOUT
    debug: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False

    def __post_init__(self) -> None:
        check_values(self, "--")


def main(argv: list[str]) -> int:
    """Export, here if this process is a rank or the only one, else in ranks that this process starts.

    Args:
        argv: the arguments after ``export-hf``.

    Returns:
        The exit code.

    Raises:
        ConfigError: a flag that cannot be, a model that Hugging Face has no architecture for, ``--out`` exists.
        CheckpointError: no checkpoint, or a damaged one; the folder cannot be written.
    """
    arguments = parse_command(ExportArguments, argv, "shardwise export-hf")
    world_size, here = checked_world_size(arguments.nproc)
    if RankEnvironment.read() is None:
        check_free_target(checked_out(arguments.out))
    if not here:
        # A mistake costs less to find before the ranks are started.
        _open(arguments, world_size)
        program = shardwise_command("export-hf", *argv)
        return launch_ranks(world_size, program, command="shardwise export-hf", debug=arguments.debug)
    import torch

    from shardwise.communication.agreement import agree
    from shardwise.huggingface import save_pretrained
    from shardwise.training.ranks import open_ranks

    with open_ranks("cpu", timeout=arguments.timeout) as ranks:
        opened = agree(lambda: _open(arguments, world_size), group=ranks.control)
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
    return 0


def _open(arguments: ExportArguments, world_size: int) -> OpenCheckpoint:
    from shardwise.huggingface.saving import check_target

    opened = open_checkpoint(Path(arguments.checkpoint))
    opened.check_fits(world_size)
    check_target(Path(arguments.out))
    return opened


def _fields(opened: OpenCheckpoint) -> dict[str, Any]:
    """What a run knows beside its model: which token ends a text, and so begins one."""
    from shardwise.training.settings import Settings

    if not isinstance(opened.origin, Settings) or opened.tokenizer is None:
        return {}
    return {"bos_token_id": opened.tokenizer.eos_id, "eos_token_id": opened.tokenizer.eos_id}
