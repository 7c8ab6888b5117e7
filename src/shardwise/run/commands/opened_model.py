"""Find and load the model of a command: from a checkpoint of a run or an import, or from a Hugging Face folder."""

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from shardwise.core.atomic_files import no_folder
from shardwise.core.communication.agreement import agree, decide
from shardwise.core.errors import CheckpointError, ConfigError, DataError
from shardwise.core.json_text import shown
from shardwise.core.sharded_state import sharded_state_dict
from shardwise.core.topology import Groups, Topology
from shardwise.data.tokenizer import ChatTemplate, PaddedTokenizer, Tokenizer
from shardwise.models.by_plan.model import PlannedModel
from shardwise.models.config import ModelConfig
from shardwise.models.description import Model, ModelChunks
from shardwise.run.build import describe
from shardwise.run.processes.ranks import Ranks
from shardwise.run.settings import Settings
from shardwise.run.unfinished import check_done, stopped_at
from shardwise.storage import checkpoint, huggingface
from shardwise.storage.adapters import adapters_vocab_size, load_adapter_, read_adapter_config
from shardwise.storage.checkpoint.folder import PUBLISHED, held, step_of
from shardwise.storage.checkpoint.manifest import MANIFEST_NAME, Manifest, check_state_fits
from shardwise.storage.huggingface.architectures import ARCHITECTURES
from shardwise.storage.huggingface.generation_config import GENERATION_CONFIG_NAME, GenerationDefaults
from shardwise.storage.huggingface.gguf.folder import is_gguf
from shardwise.storage.huggingface.megatron.folder import is_megatron
from shardwise.storage.huggingface.pretrained import (
    ADAPTER_CONFIG_NAME,
    CONFIG_NAME,
    PretrainedFolder,
    holds_adapters_alone,
)
from shardwise.storage.huggingface.tensor_folder import read_json
from shardwise.training.bounds import DEFAULT_SEQUENCE
from shardwise.training.optimizer.mixed_precision import PRECISIONS

TO_BRING_A_TOKENIZER = (
    "put the model's tokenizer.json and tokenizer_config.json there (transformers makes them from other files: "
    "AutoTokenizer.from_pretrained(MODEL_DIR).save_pretrained(MODEL_DIR))"
)


@dataclass(frozen=True)
class OpenCheckpoint:
    """A model without its tensors.

    Attributes:
        folder: folder of the checkpoint, or the Hugging Face folder.
        dtype: dtype of the weights.
        config: content of the model's ``config.json``; None for the model of a training run.
        tokenizer: tokenizer of the model; None if it was imported without a readable one.
        source: the opened Hugging Face folder; None for a checkpoint.
        adapter: folder of adapters to apply to the model.
    """

    folder: Path
    description: ModelConfig
    dtype: torch.dtype | None
    config: huggingface.PretrainedConfig | None
    tokenizer: Tokenizer | None
    source: PretrainedFolder | None = None
    adapter: Path | None = None

    def sequence_length(self, given: int | None) -> int:
        """Return the sequence length: ``given``, or by default 512 or the model's maximum, whichever is less."""
        longest = self.description.max_sequence_length
        length = given or min(DEFAULT_SEQUENCE, longest)
        if length > longest:
            raise ConfigError(f"--sequence-length {length} is more than {longest}, the longest sequence of the model")
        return length

    def generation_defaults(self) -> GenerationDefaults:
        """Read the generation defaults from the model's files; a training run has none."""
        if self.config is None:
            return GenerationDefaults()
        # The adapters may use another token to end a text.
        beside = self.adapter is not None and (self.adapter / GENERATION_CONFIG_NAME).exists()
        return GenerationDefaults(self.adapter if beside else self.folder, self.config.values)

    def chat_template(self) -> ChatTemplate | None:
        """Read the chat template of the adapters, or else of the model; None if neither has one."""
        beside = None if self.adapter is None else ChatTemplate.load(self.adapter)
        return beside or ChatTemplate.load(self.folder)

    def load_model(self, ranks: Ranks, *, exact_parts: int | None = None, pp: int = 1) -> Model:
        """Load the model and its adapters, if any, split over all ranks; every rank calls.

        Args:
            ranks: the ranks.
            exact_parts: makes it exact (``ModelConfig.exact_parts``), if not None.
            pp: number of pipeline stages; the ranks of each split its layers.
        """
        model = self._load_weights(ranks, exact_parts, pp)
        if self.adapter is not None:
            if self.config is not None:
                architecture = self.config.architecture
            else:
                # The model_type of an export, as for a model that a run trained.
                architecture = ARCHITECTURES[
                    huggingface.config_to_json(huggingface.describe_model(model))["model_type"]
                ]
            # Adapters of a model without a table are refused before.
            assert not isinstance(model, PlannedModel)
            load_adapter_(model, self.adapter, architecture)
        return model

    def _load_weights(self, ranks: Ranks, exact_parts: int | None, pp: int) -> Model:
        tp = ranks.world_size // pp
        settings: dict[str, Any] = {"pipeline_model_parallel_size": pp}
        groups = Groups(tp=ranks.world) if pp == 1 else Groups.of(Topology.create(tp=tp, pp=pp))
        if exact_parts is not None:
            # Exact arithmetic is that of a group, and has whole experts.
            groups, settings["exact_parts"] = Groups.of(Topology.create(tp=tp, pp=pp, etp=1)), exact_parts
        if self.source is not None:
            loaded = huggingface.load_pretrained(self.source, groups=groups, device=ranks.device, **settings)
            assert not isinstance(loaded, ModelChunks)
            return loaded
        # Compare the sizes in the settings with the tensors before allocating memory by these sizes.
        agree(self._check_sizes, group=ranks.control)
        outline = self._build_model(groups, torch.device("meta"), settings)
        shapes = sharded_state_dict(outline, "model.", group=groups.tp)
        # A run with fp32 copies of its weights saves the copies.
        agree(
            lambda: check_state_fits(self.folder, Manifest.read(self.folder), shapes, convert=True), group=ranks.control
        )
        model = self._build_model(groups, ranks.device, settings)
        checkpoint.load(
            self.folder,
            sharded_state_dict(model, "model.", group=groups.tp),
            group=ranks.control,
            allow_extra=True,
            convert=True,
        )
        return model

    def _check_sizes(self) -> None:
        """Check the sizes that determine how many tensors and buffers are allocated."""
        tensors = Manifest.read(self.folder).tensors.values()
        layers, width = self.description.num_layers, max(self.description.hidden_size, self.description.heads.width)
        if layers > len(tensors):
            raise CheckpointError(
                f"checkpoint {self.folder} has {len(tensors)} tensors, and its settings ask for {layers} layers"
            )
        longest = max((size for tensor in tensors for size in tensor.shape), default=0)
        if width > longest:
            raise CheckpointError(
                f"checkpoint {self.folder} has no tensor as wide as {width}, which its settings ask for"
            )

    def _build_model(self, groups: Groups, device: torch.device, settings: Mapping[str, Any]) -> Model:
        config = huggingface.model_config(
            self.description, params_dtype=self.dtype, perform_initialization=False, **settings
        )
        return huggingface.build_model(config, groups=groups, device=device)


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation.

    Attributes:
        data: name and amount of the data, as text for the user.
        metrics: metrics by the names that ``shardwise eval`` prints: ``loss`` (nats per token), ``perplexity`` and
            ``bits per byte``.
        notes: reasons why data was left out, one line each.
    """

    data: str
    metrics: dict[str, float]
    notes: tuple[str, ...] = ()


def as_tuple(paths: str | Sequence[str]) -> tuple[str, ...]:
    return (paths,) if isinstance(paths, str) else tuple(paths)


def check_fits(description: ModelConfig, world_size: int, pp: int = 1) -> None:
    """Raise ConfigError unless a model can be split over ``world_size`` ranks, in ``pp`` pipeline stages."""
    heads, layers = description.num_attention_heads, description.num_layers
    if world_size % pp != 0:
        raise ConfigError(f"--pp {pp} does not divide the {world_size} ranks; start a multiple of it with --nproc")
    if pp > layers:
        raise ConfigError(f"the model's {layers} layers cannot be split over --pp {pp} stages; use {layers} or fewer")
    if pp > 1 and description.transformers_config is not None:
        raise ConfigError(
            f"the model is computed by transformers, because Shardwise has no table for it, and has no pipeline stages "
            f"(--pp {pp}); split its layers with --tp"
        )
    if world_size // pp > heads:
        raise ConfigError(
            f"the model's {heads} attention heads cannot be split over {world_size // pp} ranks; use --nproc "
            f"{heads * pp} or less"
        )


def find_checkpoint(path: Path, *, otherwise: str = "") -> Path:
    """Return the checkpoint at ``path``, or the newest one if ``path`` is a run or its folder of checkpoints."""
    if not os.path.isdir(path):
        raise CheckpointError(no_folder(path, "give the --out of a training run or one of its checkpoints"))
    if PUBLISHED.fullmatch(path.name) or (path / MANIFEST_NAME).is_file():
        return path
    newest = checkpoint.latest(path / "checkpoints") or checkpoint.latest(path)
    if newest is None:
        raise CheckpointError(
            f"{path} holds no checkpoint; give the --out of a training run or one of its checkpoints/step-*{otherwise}"
        )
    return newest


@contextmanager
def held_checkpoint(path: Path, *, otherwise: str = "") -> Iterator[Path]:
    """Find a checkpoint as ``find_checkpoint`` does, and keep a run from deleting it during the block."""
    while True:
        folder = find_checkpoint(path, otherwise=otherwise)
        with held(folder) as there:
            # A run that saves has removed it in the meantime, and published a newer one before.
            if there or folder == path:
                yield folder
                return


@contextmanager
def same_checkpoint(path: str | PathLike[str], ranks: Ranks) -> Iterator[str | PathLike[str]]:
    """Choose a checkpoint for all ranks, the newest one of a run's folder; every rank calls.

    No run deletes it during the block. Another path, such as a Hugging Face folder, is returned unchanged.
    """
    with ExitStack() as stack:

        def choose(_: object) -> str | PathLike[str]:
            folder = Path(path)
            if is_pretrained(folder) or (folder / ADAPTER_CONFIG_NAME).is_file() or not folder.is_dir():
                return path
            try:
                return str(stack.enter_context(held_checkpoint(folder)))
            except CheckpointError:
                # Opening it says in full what is wrong.
                return path

        yield decide(lambda: None, choose, group=ranks.control)


def open_model(path: str | PathLike[str], adapter: str | PathLike[str] | None = None) -> OpenCheckpoint:
    """Find the model at a path and read it without its tensors."""
    path, adapter = Path(path), None if adapter is None else Path(adapter)
    if adapter is not None:
        # Raise errors of the adapter before the model is read.
        read_adapter_config(adapter)
    is_model, is_adapter = is_pretrained(path), (path / ADAPTER_CONFIG_NAME).is_file()
    if is_adapter and not is_model:
        if adapter is not None:
            raise ConfigError(f"{path} holds adapters, not a model for those of {adapter}; give the model's folder")
        return open_model(_base_of(path), path)
    if is_adapter and adapter is None:
        raise ConfigError(
            f"{path} holds a model and adapters; use both with --adapter {path}, or move its {ADAPTER_CONFIG_NAME} away"
        )
    if is_model:
        opened = _open_pretrained(path, adapter)
    else:
        opened = open_checkpoint(path, otherwise=", or a Hugging Face folder (with config.json)")
    return dataclasses.replace(opened, adapter=adapter)


def is_pretrained(path: Path) -> bool:
    """True for a Hugging Face folder, a GGUF file or Megatron's checkpoints; ours may have a ``config.json``."""
    if is_gguf(path) or is_megatron(path):
        return True
    if not (path / CONFIG_NAME).is_file() or (path / MANIFEST_NAME).exists():
        return False
    # A folder without weights or adapters is a model whose weights are missing.
    return not holds_adapters_alone(path)


def _base_of(adapter: Path) -> Path:
    """Return the folder of the base model that the adapters name."""
    read_adapter_config(adapter)
    base = read_json(adapter / ADAPTER_CONFIG_NAME).get("base_model_name_or_path")
    hint = f"give the model's folder yourself: shardwise generate MODEL_DIR --adapter {adapter}"
    if not isinstance(base, str) or not base:
        raise ConfigError(f"{adapter / ADAPTER_CONFIG_NAME} does not name the adapters' model; {hint}")
    if not os.path.exists(base):
        raise CheckpointError(f"{adapter} holds adapters of the model {base}: {no_folder(Path(base), hint)}")
    if not is_pretrained(Path(base)):
        raise CheckpointError(f"{adapter} holds adapters of the model {base}, which is no Hugging Face folder; {hint}")
    return Path(base)


def _open_pretrained(path: Path, adapter: Path | None) -> OpenCheckpoint:
    source = PretrainedFolder(path)
    if adapter is not None and source.description.transformers_config is not None:
        raise ConfigError(
            f"{adapter} holds adapters, and {path} is a {source.architecture.model_type} model, which Shardwise has no "
            "table for; merge them with peft first (merge_and_unload, save_pretrained)"
        )
    if adapter is not None:
        num_rows = source.description.vocab_size
        source.change_vocabulary_(adapters_vocab_size(adapter, source.architecture, num_rows))
    # Adapters were trained with the tokenizer in their folder.
    beside = adapter is not None and (adapter / "tokenizer.json").exists()
    try:
        tokenizer = PaddedTokenizer.load(adapter if adapter is not None and beside else source.path)
    except DataError as error:
        raise DataError(f"{error}; {TO_BRING_A_TOKENIZER}") from error
    return OpenCheckpoint(source.path, source.description, source.dtype, source.config, tokenizer, source)


def open_checkpoint(path: Path, *, otherwise: str = "") -> OpenCheckpoint:
    """Find a checkpoint (see ``find_checkpoint``) and read it without its tensors."""
    check_done(path)
    with held_checkpoint(path, otherwise=otherwise) as folder:
        return _open_checkpoint(folder)


def _open_checkpoint(folder: Path) -> OpenCheckpoint:
    meta = checkpoint.read_meta(folder)
    if "huggingface" in meta:
        imported = meta["huggingface"]
        config = imported.get("config") if isinstance(imported, dict) else None
        if not isinstance(config, dict):
            raise CheckpointError(f"{folder}: huggingface.config in its meta is {shown(config)}; it must be an object")
        origin = huggingface.config_from_json(config, where=f"{folder}: config.json")
        own = PaddedTokenizer.load(folder) if "tokenizer_sha256" in meta else None
        return OpenCheckpoint(folder, origin.description, origin.dtype, origin, own)
    if "base_sha256" in meta:
        raise CheckpointError(
            f"{folder} is of shardwise finetune, whose --out becomes a Hugging Face folder, or adapters: give that "
            f"folder; if it has none yet, {stopped_at(step_of(folder))}"
        )
    missing = [name for name in ("settings", "tokenizer_sha256") if name not in meta]
    if missing:
        raise CheckpointError(f"{folder} was not written by shardwise train: {', '.join(missing)} is missing in it")
    tokenizer = Tokenizer.load(folder)
    if tokenizer.sha256 != meta["tokenizer_sha256"]:
        raise CheckpointError(f"{folder / 'tokenizer.json'} is not the tokenizer that the model was trained with")
    try:
        settings = Settings.from_json(meta["settings"])
        description = describe(settings.model, tokenizer.vocab_size)
        return OpenCheckpoint(folder, description, PRECISIONS[settings.training.dtype].params_dtype, None, tokenizer)
    except ConfigError as error:
        raise CheckpointError(f"{folder}: {error}") from error
