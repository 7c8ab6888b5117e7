"""Write the final files of a run with a pretrained model: the fine-tuned model or its adapters."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from shardwise.core.atomic_files import write_atomically
from shardwise.core.communication.agreement import agree
from shardwise.core.errors import ConfigError
from shardwise.models.description import ModelChunks
from shardwise.models.transformer_model import TransformerModel
from shardwise.run.settings import FinetuneSettings
from shardwise.run.tasks.model_card import model_card
from shardwise.run.tasks.pretrained_model import ADAPTER_FILES, MODEL_FILES, PretrainedModel
from shardwise.run.tasks.task import Session
from shardwise.storage.adapters import merge_lora_, remove_lora_, save_adapter
from shardwise.storage.huggingface import save_pretrained
from shardwise.storage.huggingface.megatron.arguments import MEGATRON
from shardwise.storage.huggingface.pretrained import CONFIG_NAME
from shardwise.storage.huggingface.tensor_folder import README_NAME


def write_adapters(session: Session) -> None:
    """Write the run's adapters into its folder; every rank calls.

    ``adapter_config.json`` is written last: if it exists, the adapters are complete.
    """
    model, out, source, control = session.trainer.model, session.out, _source_of(session), session.ranks.control
    assert isinstance(model, TransformerModel)
    # Next to the model of an earlier run, the adapters would be read as adapters of that model.
    agree(lambda: _remove(out, MODEL_FILES) if session.ranks.is_first else None, group=control)
    # An absolute path is valid from any working directory.
    base = os.path.abspath(source.settings.base)
    save_adapter(model, out, source.folder.architecture, base_model=base, base_vocab_size=source.folder.new_ids.start)

    def add_files() -> None:
        try:
            text = _card(session).encode()
            write_atomically(out / README_NAME, lambda file: file.write(text))
        except OSError as error:
            raise ConfigError(f"cannot write to {out}: {error.strerror or error}") from error

    agree(lambda: add_files() if session.ranks.is_first else None, group=control)


def write_model(session: Session) -> None:
    """Write the fine-tuned model, or the one with its adapters merged, into the run's folder; every rank calls.

    ``config.json`` is written last: if it exists, the model is complete.
    """
    model, out, source, control = session.trainer.model, session.out, _source_of(session), session.ranks.control
    if source.settings.lora.is_on:
        assert isinstance(model, TransformerModel)
        # Not at the top: PyTorch's part of it is slow to import.
        from shardwise.training.gradients.fully_sharded import whole_parts

        for part in whole_parts(model):
            merge_lora_(part)
        remove_lora_(model)
    tokenizer = source.tokenizer
    eos_ids = agree(tokenizer.new_eos_ids, group=control)
    partial, architecture = out / "export.partial", source.folder.architecture
    agree(lambda: shutil.rmtree(partial, ignore_errors=True) if session.ranks.is_first else None, group=control)
    save_pretrained(
        list(model) if isinstance(model, ModelChunks) else model,  # type: ignore[arg-type]
        partial,
        source=source.folder.path,
        architecture=None if architecture is MEGATRON else architecture.model_type,
        dtype=source.folder.dtype,
        fields={"eos_token_id": eos_ids[0]} if eos_ids else {},
        card=agree(lambda: _card(session), group=control),
    )
    # Again the files of the tokenizer, in which the tokens that end a text are those of this run.
    agree(lambda: tokenizer.save(partial) if session.ranks.is_first and eos_ids else None, group=control)
    agree(lambda: _move_into_place(partial, out) if session.ranks.is_first else None, group=control)


def _source_of(session: Session) -> PretrainedModel:
    assert isinstance(session.task.source, PretrainedModel)
    return session.task.source


def _card(session: Session) -> str:
    settings = session.settings
    assert isinstance(settings, FinetuneSettings)
    return model_card(
        settings,
        session.out,
        model_name=settings.model_name,
        layout={
            kind: session.topology.size(kind)
            for kind in ("tp", "pp", "cp", "dp")
            if kind != "cp" or session.topology.size(kind) > 1
        },
        data=session.data.name,
        base=_source_of(session).folder.path,
        is_adapter=settings.lora.is_on and not settings.lora.lora_merge,
    )


def _remove(out: Path, patterns: Sequence[str]) -> None:
    """Remove the files of an earlier run from ``out``."""
    try:
        for stale in [path for pattern in patterns for path in out.glob(pattern)]:
            stale.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot remove the files of an earlier run from {out}: {error.strerror or error}") from error


def _move_into_place(partial: Path, out: Path) -> None:
    """Replace an earlier export or adapters by the files in ``partial``."""
    _remove(out, (*ADAPTER_FILES, *MODEL_FILES))
    try:
        for path in sorted(partial.iterdir(), key=lambda path: path.name == CONFIG_NAME):
            if path.is_dir() and (out / path.name).is_dir():
                # Only an empty folder can be replaced.
                shutil.rmtree(out / path.name)
            path.replace(out / path.name)
        partial.rmdir()
    except OSError as error:
        raise ConfigError(f"cannot move the model from {partial} to {out}: {error.strerror or error}") from error
