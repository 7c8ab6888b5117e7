"""Conversion between checkpoints and Hugging Face folders."""

import json
import os
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from shardwise.core.atomic_files import read_regular
from shardwise.core.communication.agreement import agree
from shardwise.core.errors import ConfigError, DataError
from shardwise.core.json_text import MAX_CONFIG_BYTES
from shardwise.core.sharded_state import sharded_state_dict
from shardwise.core.topology import Groups
from shardwise.data.tokenizer import Tokenizer
from shardwise.models.description import ModelChunks
from shardwise.run.checkpoint_writer import lock_folder
from shardwise.run.commands.opened_model import (
    TO_BRING_A_TOKENIZER,
    OpenCheckpoint,
    check_fits,
    is_pretrained,
    open_checkpoint,
    open_model,
    same_checkpoint,
)
from shardwise.run.processes.ranks import Ranks, open_ranks
from shardwise.run.settings import Settings
from shardwise.run.tasks.model_card import model_card, of_merged
from shardwise.storage import checkpoint as checkpoints
from shardwise.storage.adapters import merge_lora_, remove_lora_
from shardwise.storage.checkpoint.manifest import Manifest
from shardwise.storage.huggingface import config_to_json, load_pretrained, save_pretrained
from shardwise.storage.huggingface.architectures.architecture import ExpertNames
from shardwise.storage.huggingface.exporting import check_target
from shardwise.storage.huggingface.generation_config import eos_ids_of
from shardwise.storage.huggingface.megatron.arguments import MEGATRON
from shardwise.storage.huggingface.megatron.exporting import save_megatron
from shardwise.storage.huggingface.megatron.folder import MegatronFolder, is_megatron
from shardwise.storage.huggingface.megatron.optimizer_state import load_optimizer_state
from shardwise.storage.huggingface.pretrained import ADAPTER_CONFIG_NAME, CONFIG_NAME, PretrainedFolder, own_config
from shardwise.storage.huggingface.tensor_folder import README_NAME, copy_companion_files, own_file
from shardwise.training.bounds import DEFAULT_FILE_GB, DEFAULT_TIMEOUT, FILE_GB, TIMEOUT, checks_arguments


def open_for_export(
    checkpoint: str | PathLike[str], out: str | PathLike[str], *, merge: bool, world_size: int
) -> OpenCheckpoint:
    """Read a checkpoint without its tensors. Raises as ``export_hf``."""
    path = Path(checkpoint)
    is_adapter = (path / ADAPTER_CONFIG_NAME).is_file()
    if is_pretrained(path) and not is_adapter:
        raise ConfigError(f"{path} is a Hugging Face folder already; give the --out of a training run or an import")
    if is_adapter != merge:
        raise ConfigError(
            f"{path} holds adapters, as peft reads them; merge them into their model with --merge"
            if is_adapter
            else f"--merge is for adapters, and {path} has no {ADAPTER_CONFIG_NAME}; leave it out"
        )
    opened = open_model(path) if is_adapter else open_checkpoint(path)
    check_fits(opened.description, world_size)
    check_target(Path(out))
    return opened


@checks_arguments
def export_hf(
    checkpoint: str | PathLike[str],
    out: str | PathLike[str],
    *,
    dtype: Literal["float32", "float64", "bfloat16", "float16"] | None = None,
    architecture: str | None = None,
    expert_names: ExpertNames | None = None,
    max_file_gb: Annotated[float, FILE_GB] = DEFAULT_FILE_GB,
    merge: bool = False,
    timeout: Annotated[float, TIMEOUT] = DEFAULT_TIMEOUT,
) -> Path:
    """Export a checkpoint's model and its tokenizer as a Hugging Face folder; every rank calls.

    Args:
        checkpoint: folder of one checkpoint, or folder of a run or an import, whose newest checkpoint is taken. With
            ``merge``, folder of adapters.
        out: folder to write; it must be empty or not exist.
        dtype: dtype of the weights; if None, the dtype of the checkpoint.
        architecture: model_type to write, such as "mistral". If None, the model_type of the import, else the first
            that fits.
        expert_names: names of experts: "separate" for a tensor for each, or "fused" for one for all experts of a layer,
            which transformers 5 reads too. If None, the form that transformers writes.
        max_file_gb: maximum size of a file of weights, in 1e9 bytes.
        merge: export the base model with the adapters merged into it; ``checkpoint`` is a folder of adapters that names
            the folder of its base model.
        timeout: maximum wait for another rank, in seconds.

    Returns:
        ``out``, which transformers can load.

    Raises:
        ConfigError: an argument is out of range or does not fit the checkpoint, the model cannot be split over this
            many ranks, ``out`` exists, or Hugging Face has no architecture for the model.
        CheckpointError: the checkpoint is missing or damaged, or ``out`` cannot be written.
    """
    with open_ranks("cpu", timeout=timeout) as ranks, same_checkpoint(checkpoint, ranks) as checkpoint:
        opened = agree(
            lambda: open_for_export(checkpoint, out, merge=merge, world_size=ranks.world_size), group=ranks.control
        )
        fields: dict[str, Any] = {}
        if opened.config is None and opened.tokenizer is not None:
            # The run's tokenizer has a token that ends a text; the same token begins a text.
            fields = dict.fromkeys(("bos_token_id", "eos_token_id"), opened.tokenizer.eos_id)
        elif opened.adapter is not None:
            # Adapters may have been trained to end a text with another token, which they keep in a separate file.
            ends = agree(lambda: opened.generation_defaults().eos_ids(), group=ranks.control)
            if ends and ends != agree(lambda: eos_ids_of(opened.folder), group=ranks.control):
                fields = {"eos_token_id": ends[0]}
        model = opened.load_model(ranks)
        if merge:
            merge_lora_(model)
            remove_lora_(model)
        save_pretrained(
            model,
            fspath(out),
            source=opened.folder,
            architecture=architecture,
            expert_names=expert_names,
            dtype=None if dtype is None else getattr(torch, dtype),
            max_file_size=int(max_file_gb * 1e9),
            fields=fields,
            card=agree(lambda: _card(opened), group=ranks.control),
            adapters=opened.adapter,
        )
        return Path(out)


def _card(opened: OpenCheckpoint) -> str | None:
    """Return the model card of a trained model or of merged adapters; None for an imported model."""
    if opened.adapter is not None:
        try:
            path = own_file(opened.adapter, README_NAME)
            card = "" if path is None else read_regular(path, limit=MAX_CONFIG_BYTES).decode()
        except (OSError, UnicodeDecodeError):
            return None
        return of_merged(card) or None
    if opened.config is not None:
        return None
    settings = Settings.from_json(checkpoints.read_meta(opened.folder)["settings"])
    sizes = {"tp": settings.parallel.tp, "pp": settings.parallel.pp}
    data = ", ".join(Path(path).name for path in settings.data)
    # The run's folder may have a link to its checkpoints, and a checkpoint may be given as a link.
    runs = [path.parent.parent for path in (Path(os.path.abspath(opened.folder)), opened.folder.resolve())]
    run = next((each for each in runs if (each / "metrics.jsonl").exists()), runs[0])
    steps = Manifest.read(opened.folder).step
    return model_card(settings, run, model_name=settings.model_name, layout=sizes, data=data, steps=steps)


@checks_arguments
def export_megatron(
    checkpoint: str | PathLike[str],
    out: str | PathLike[str],
    *,
    dtype: Literal["float32", "float64", "bfloat16", "float16"] | None = None,
    timeout: Annotated[float, TIMEOUT] = DEFAULT_TIMEOUT,
) -> Path:
    """Export a checkpoint's model as a folder of Megatron's checkpoints; every rank calls.

    Args:
        checkpoint: folder of one checkpoint, or folder of a run or an import, whose newest checkpoint is taken.
        out: folder to write; it must be empty or not exist.
        dtype: dtype of the weights; if None, the dtype of the checkpoint.
        timeout: maximum wait for another rank, in seconds.

    Returns:
        ``out``, which Megatron Core loads at any layout (``--load``, format ``torch_dist``).

    Raises:
        ConfigError: the model cannot be split over this many ranks, Megatron has no arguments for it, or ``out``
            exists.
        CheckpointError: the checkpoint is missing or damaged, or ``out`` cannot be written.
    """
    with open_ranks("cpu", timeout=timeout) as ranks, same_checkpoint(checkpoint, ranks) as checkpoint:
        opened = agree(
            lambda: open_for_export(checkpoint, out, merge=False, world_size=ranks.world_size), group=ranks.control
        )
        step = agree(lambda: Manifest.read(opened.folder).step, group=ranks.control)
        save_megatron(
            opened.load_model(ranks), Path(out), iteration=step, dtype=None if dtype is None else getattr(torch, dtype)
        )
        return Path(out)


@dataclass(frozen=True)
class Imported:
    """Result of an import.

    Attributes:
        checkpoint: folder of the checkpoint.
        can_generate: True if ``generate`` can continue texts with the model.
        note: what the model lacks for generation; empty if it lacks nothing.
    """

    checkpoint: Path
    can_generate: bool
    note: str = ""


def open_for_import(folder: str | PathLike[str], out: str | PathLike[str], world_size: int) -> PretrainedFolder:
    """Read a Hugging Face folder without its tensors. Raises as ``import_hf``."""
    source = PretrainedFolder(Path(folder))
    check_fits(source.description, world_size)
    if checkpoints.latest(Path(out) / "checkpoints") is not None:
        raise ConfigError(f"{out} has a checkpoint already; choose another --out")
    return source


@checks_arguments
def import_hf(
    folder: str | PathLike[str],
    out: str | PathLike[str],
    *,
    dtype: Literal["float32", "float64", "bfloat16", "float16"] | None = None,
    timeout: Annotated[float, TIMEOUT] = DEFAULT_TIMEOUT,
) -> Imported:
    """Convert a Hugging Face folder, or a GGUF file, to a checkpoint; every rank calls.

    Args:
        folder: folder or GGUF file of the model; docs/huggingface.md lists the supported architectures.
        out: folder for the checkpoint; it must not have a checkpoint yet.
        dtype: dtype of the weights; if None, the dtype of the model.
        timeout: maximum wait for another rank, in seconds.

    Returns:
        The checkpoint, on every rank.

    Raises:
        ConfigError: the architecture or a value in ``config.json`` is not supported, the model cannot be split over
            this many ranks, or ``out`` has a checkpoint.
        CheckpointError: a file is missing or damaged, tensors do not match ``config.json``, or ``out`` cannot be
            written.
    """
    return _import_folder(folder, out, dtype, timeout)


@checks_arguments
def import_megatron(
    folder: str | PathLike[str],
    out: str | PathLike[str],
    *,
    dtype: Literal["float32", "float64", "bfloat16", "float16"] | None = None,
    optimizer: bool = False,
    timeout: Annotated[float, TIMEOUT] = DEFAULT_TIMEOUT,
) -> Imported:
    """Convert a checkpoint of Megatron to a checkpoint; every rank calls.

    Pickles are read by a machine of this library that knows a closed list of names and runs nothing.

    Args:
        folder: folder of Megatron's checkpoints, or of one iteration; ``torch_dist``, or a file for each rank
            (docs/porting_checkpoints.md). Its tokenizer is read if ``tokenizer.json`` is there too.
        out: folder for the checkpoint; it must not have a checkpoint yet.
        dtype: dtype of the weights; if None, the ``params_dtype`` of the arguments.
        optimizer: read the state of the optimizer too, in the form ``dp_reshardable``; weights are then its fp32 ones.
        timeout: maximum wait for another rank, in seconds.

    Returns:
        The checkpoint, on every rank.

    Raises:
        ConfigError: ``folder`` is no checkpoint of Megatron, an argument has a value that is not supported, the model
            cannot be split over this many ranks, or ``out`` has a checkpoint.
        CheckpointError: a file or rank is missing, damaged or names anything outside of the list; tensors do not match
            the arguments; or ``out`` cannot be written.
    """
    check_megatron(folder)
    return _import_folder(folder, out, dtype, timeout, with_optimizer=optimizer)


def check_megatron(folder: str | PathLike[str]) -> None:
    """Raise ConfigError unless a folder has checkpoints of Megatron."""
    if not is_megatron(Path(folder)):
        raise ConfigError(
            f"{folder} has no checkpoint of Megatron: neither latest_checkpointed_iteration.txt, nor .metadata with "
            "common.pt, nor folders mp_rank_*; give the --save folder of Megatron's training"
        )


def _import_folder(
    folder: str | PathLike[str],
    out: str | PathLike[str],
    dtype: str | None,
    timeout: float,
    *,
    with_optimizer: bool = False,
) -> Imported:
    with open_ranks("cpu", timeout=timeout) as ranks, lock_folder(Path(out), ranks):
        source = agree(lambda: open_for_import(folder, out, ranks.world_size), group=ranks.control)
        try:
            tokenizer = Tokenizer.load(source.path)
            if own_file(source.path, "tokenizer.json") is None:
                raise DataError(f"{source.path / 'tokenizer.json'} is a link that leaves the model's folder")
            identity = {"tokenizer_sha256": tokenizer.sha256, "vocab_size": tokenizer.vocab_size}
            lack = ""
        except DataError as error:
            identity, lack = {}, str(error)
        chosen = source.dtype if dtype is None else getattr(torch, dtype)
        path = _import(source, Path(out), chosen, identity, ranks, with_optimizer)
        is_gpt = source.description.kind == "gpt"
        note = ""
        if lack:
            means = "exports have none"
            if is_gpt:
                means = "shardwise generate cannot use it, and exports have no tokenizer"
            cure = f"{TO_BRING_A_TOKENIZER}, and import it again"
            note = f"the checkpoint has no tokenizer, so that {means} ({lack}); {cure}"
        return Imported(path, is_gpt and not lack, note)


def _import(
    source: PretrainedFolder,
    out: Path,
    dtype: torch.dtype | None,
    identity: dict[str, object],
    ranks: Ranks,
    with_optimizer: bool,
) -> Path:
    """Write the checkpoint, with ``identity`` identifying the tokenizer."""
    model = load_pretrained(source, groups=Groups(tp=ranks.world), dtype=dtype, device="cpu")
    config = agree(lambda: _config_of(source, dtype), group=ranks.control)

    def copy_files(folder: Path) -> None:
        (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        copy_companion_files(source.path, folder)

    state, step = sharded_state_dict(model, "model.", group=ranks.world), 0
    if with_optimizer:
        assert not isinstance(model, ModelChunks)
        assert isinstance(source.tensors, MegatronFolder)
        of_optimizer, taken = agree(lambda: load_optimizer_state(source, model), group=ranks.control)
        state, step = state | of_optimizer, source.tensors.iteration
        # A trainer counts the steps that an overflow skipped.
        identity = {**identity, "skipped_steps": step - taken}
    return checkpoints.save(
        out / "checkpoints",
        step,
        state,
        {"huggingface": {"config": config}, **identity},
        group=ranks.world,
        extra_files=copy_files,
    )


def _config_of(source: PretrainedFolder, dtype: torch.dtype | None) -> dict[str, Any]:
    """Return the ``config.json`` of a checkpoint; of Megatron's, its arguments if no architecture fits the model."""
    # The description has the heads that were found in the files.
    description, base = source.description, own_config(source.path)
    if source.architecture is not MEGATRON:
        return config_to_json(description, architecture=source.architecture.model_type, dtype=dtype, base=base)
    try:
        return config_to_json(description, dtype=dtype, base=base)
    except ConfigError:
        return {**source.config.values, "dtype": str(dtype or source.dtype).removeprefix("torch.")}
