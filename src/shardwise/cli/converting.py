"""Between checkpoints and Hugging Face folders: what the ranks of ``shardwise import-hf`` and ``export-hf`` do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from shardwise.cli.export_hf import ExportArguments
from shardwise.cli.import_hf import ImportArguments
from shardwise.cli.reporting import print_line
from shardwise.core.communication.agreement import agree
from shardwise.core.errors import ConfigError, DataError
from shardwise.core.files import read_regular
from shardwise.core.json_files import MAX_CONFIG_BYTES
from shardwise.core.sharded_state import sharded_state_dict
from shardwise.core.topology import Groups
from shardwise.data.tokenizer import Tokenizer
from shardwise.run.commands import opened_model as checkpoint_model
from shardwise.run.out_folder import hold_folder
from shardwise.run.processes.ranks import Ranks, open_ranks
from shardwise.run.tasks.model_card import model_card, of_merged
from shardwise.storage import checkpoint
from shardwise.storage.adapters import merge_lora_, remove_lora_
from shardwise.storage.huggingface import load_pretrained, save_pretrained
from shardwise.storage.huggingface.architectures.classifier import label_fields, label_names
from shardwise.storage.huggingface.companion_files import README_NAME, copy_companion_files
from shardwise.storage.huggingface.fields import Fields
from shardwise.storage.huggingface.folder import ADAPTER_CONFIG_NAME, PretrainedFolder
from shardwise.storage.huggingface.pretrained import CONFIG_NAME
from shardwise.storage.huggingface.saving import check_target
from shardwise.training.settings import Settings


def open_for_export(arguments: ExportArguments, world_size: int) -> checkpoint_model.OpenCheckpoint:
    """Read all of a checkpoint but its tensors.

    Raises:
        ConfigError: a Hugging Face folder, adapters without ``--merge``, ``--merge`` without adapters, more ranks than
            the model can be split over, or ``--out`` exists.
        CheckpointError: no checkpoint, or a damaged one.
    """
    path = Path(arguments.checkpoint)
    is_adapter = (path / ADAPTER_CONFIG_NAME).is_file()
    if checkpoint_model.is_pretrained(path) and not is_adapter:
        raise ConfigError(f"{path} is a Hugging Face folder already; give the --out of a training run or an import")
    if is_adapter != arguments.merge:
        raise ConfigError(
            f"{path} holds adapters, as peft reads them; merge them into their model with --merge"
            if is_adapter
            else f"--merge is for adapters, and {path} has no {ADAPTER_CONFIG_NAME}; leave it out"
        )
    opened = checkpoint_model.open_model(path) if is_adapter else checkpoint_model.open_checkpoint(path)
    checkpoint_model.check_fits(opened.description, world_size)
    check_target(Path(arguments.out))
    return opened


def export(arguments: ExportArguments) -> None:
    """Write a checkpoint as a Hugging Face folder; every rank calls.

    Raises:
        ShardwiseError: see ``open_for_export``; Hugging Face has no architecture for the model, or the folder cannot be
            written; on every rank.
    """
    with open_ranks("cpu", timeout=arguments.timeout) as ranks:
        opened = agree(lambda: open_for_export(arguments, ranks.world_size), group=ranks.control)
        fields: dict[str, Any] = {}
        if opened.config is None and opened.tokenizer is not None:
            # What a run knows beside its model: which token ends a text, and so begins one.
            fields = dict.fromkeys(("bos_token_id", "eos_token_id"), opened.tokenizer.eos_id)
        elif opened.config is not None and opened.adapter is not None and opened.description.classification is not None:
            # Adapters may come with a head of their own, whose labels the model's folder does not name.
            fields = label_fields(label_names(Fields(opened.config.values)))
        model = opened.load_model(ranks)
        if arguments.merge:
            merge_lora_(model)
            remove_lora_(model)
        save_pretrained(
            model,
            arguments.out,
            source=opened.folder,
            architecture=arguments.architecture,
            dtype=None if arguments.dtype is None else getattr(torch, arguments.dtype),
            max_file_size=int(arguments.max_file_gb * 1e9),
            fields=fields,
            card=agree(lambda: _card(opened), group=ranks.control),
        )
        if ranks.is_first:
            print(f"wrote {arguments.out}; transformers loads it: AutoModel*.from_pretrained({arguments.out!r})")


def _card(opened: checkpoint_model.OpenCheckpoint) -> str | None:
    """The card of what a run trained, merged adapters included; None for a model that was imported."""
    if opened.adapter is not None:
        try:
            card = read_regular(opened.adapter / README_NAME, limit=MAX_CONFIG_BYTES).decode()
        except (OSError, UnicodeDecodeError):
            return None
        return of_merged(card)
    if opened.config is not None:
        return None
    settings = Settings.from_json(checkpoint.read_meta(opened.folder)["settings"])
    sizes = {"tp": settings.parallel.tp, "pp": settings.parallel.pp}
    data = ", ".join(Path(path).name for path in settings.data)
    run = opened.folder.parent.parent
    return model_card(settings, run, model_name=settings.model_name, layout=sizes, data=data)


def open_for_import(arguments: ImportArguments, world_size: int) -> PretrainedFolder:
    """Read all of a Hugging Face folder but its tensors.

    Raises:
        ConfigError: an architecture or a value in ``config.json`` that is not offered, more ranks than the model can be
            split over, or ``--out`` has a checkpoint.
        CheckpointError: files that are missing or damaged.
    """
    source = PretrainedFolder(arguments.folder)
    checkpoint_model.check_fits(source.description, world_size)
    if checkpoint.latest(Path(arguments.out) / "checkpoints") is not None:
        raise ConfigError(f"{arguments.out} has a checkpoint already; choose another --out")
    return source


def import_(arguments: ImportArguments) -> None:
    """Make a checkpoint of a Hugging Face folder; every rank calls.

    Raises:
        ShardwiseError: see ``open_for_import``; the tensors are not what ``config.json`` says, or nothing can be
            written; on every rank.
    """
    with open_ranks("cpu", timeout=arguments.timeout) as ranks, hold_folder(Path(arguments.out), ranks):
        source = agree(lambda: open_for_import(arguments, ranks.world_size), group=ranks.control)
        try:
            tokenizer = Tokenizer.load(source.path)
            identity = {"tokenizer_sha256": tokenizer.sha256, "vocab_size": tokenizer.vocab_size}
            lack = ""
        except DataError as error:
            identity, lack = {}, str(error)
        path = _import(arguments, source, identity, ranks)
        if ranks.is_first:
            is_gpt = source.description.kind == "gpt" and source.description.classification is None
            use = f"; continue a text with: shardwise generate {arguments.out}" if is_gpt and not lack else ""
            print(f"wrote {path}{use}")
            if lack:
                means = "exports have none"
                if is_gpt:
                    means = "shardwise generate cannot use it, and exports have no tokenizer"
                print_line(
                    f"shardwise import-hf: the checkpoint has no tokenizer, so that {means} ({lack}); "
                    f"{checkpoint_model.TO_BRING_A_TOKENIZER}, and import it again"
                )


def _import(arguments: ImportArguments, source: PretrainedFolder, identity: dict[str, object], ranks: Ranks) -> Path:
    """Write the checkpoint; ``identity`` is what it records of the tokenizer."""
    dtype = source.dtype if arguments.dtype is None else getattr(torch, arguments.dtype)
    model = load_pretrained(arguments.folder, groups=Groups(tp=ranks.world), dtype=dtype, device="cpu")
    # What the heads found in the files add to config.json is in the class that it names.
    config = dict(source.config.values) | {
        "architectures": [source.architecture.class_name(source.description)],
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    config.pop("dtype", None)

    def copy_files(folder: Path) -> None:
        shutil.copyfile(source.path / CONFIG_NAME, folder / CONFIG_NAME)
        copy_companion_files(source.path, folder)

    return checkpoint.save(
        Path(arguments.out) / "checkpoints",
        0,
        sharded_state_dict(model, "model.", group=ranks.world),
        {"huggingface": {"config": config}, **identity},
        group=ranks.world,
        extra_files=copy_files,
    )
