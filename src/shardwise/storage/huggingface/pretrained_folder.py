"""A Hugging Face folder open for reading: which stored tensor is which of the architecture's."""

import dataclasses
import os
import re
from collections.abc import Sequence, Set
from pathlib import Path

import torch

from shardwise.core.errors import CheckpointError, ConfigError
from shardwise.core.tensor_files import some_tensors
from shardwise.models.classification import Classification
from shardwise.models.description import ModelDescription
from shardwise.storage.huggingface.architectures import Architecture
from shardwise.storage.huggingface.pretrained import PretrainedConfig, read_config
from shardwise.storage.huggingface.tensor_folder import TensorFolder, is_weight_dtype, weight_dtype


class PretrainedFolder:
    """A Hugging Face folder that is open for reading.

    Args:
        folder: a folder with ``config.json`` and safetensors files.

    Attributes:
        config: what ``config.json`` says.
        description: the model's description.
        tensors: what is stored.
        changes_head: the model is to have a head that is not the folder's.

    Raises:
        ConfigError, CheckpointError: see ``load_pretrained``.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder)
        check_model_folder(self.path)
        self.config: PretrainedConfig = read_config(self.path)
        self.tensors = TensorFolder(self.path)
        self.description: ModelDescription = self.architecture.adapt(
            self.config.description, self.tensors.tensors.keys()
        )
        self.changes_head = False
        self._stored_vocab_size = self.description.vocab_size

    @property
    def architecture(self) -> Architecture:
        """Which one the model is of."""
        return self.config.architecture

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights: what ``config.json`` says, or else the first weight's."""
        stored = list(self.tensors.tensors.values())
        # Old files store integer positions among their tensors, so the first floating-point tensor is taken. If there
        # is none, the first tensor's dtype is what the error names.
        first = next((tensor for tensor in stored if is_weight_dtype(tensor)), next(iter(stored), None))
        if self.config.dtype is not None or first is None:
            return self.config.dtype or torch.float32
        return weight_dtype(first)

    def change_head_(self, head: Classification) -> None:
        """Let the model have a classification head: the folder's if it is of the same size, else a new one.

        Raises:
            ConfigError: the architecture has no such head.
        """
        self.architecture.classifier_of(head.task)
        own = self.description.classification
        # What labels mean, and which token is padding, may be said otherwise of the same head.
        self.changes_head = own is None or (own.task, own.num_labels) != (head.task, head.num_labels)
        self.description = self.architecture.with_head(self.description, head)

    def change_vocabulary_(self, size: int) -> None:
        """Let the model have so many ids: the first of the folder's, or all of them and others, whose rows are 0.

        Raises:
            ConfigError: ``size`` is not at least 1.
        """
        if size < 1:
            raise ConfigError(f"vocab_size is {size}; a vocabulary needs at least 1 id")
        self.description = dataclasses.replace(self.description, vocab_size=size)

    def stored_shape(self, key: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape that the parameter ``key``, of ``shape`` in the model, has in the folder."""
        is_of_vocabulary = key.startswith(("embedding.word_embeddings.", "output_layer."))
        return (self._stored_vocab_size, *shape[1:]) if is_of_vocabulary else tuple(shape)

    def stored_names(self, expected: Set[str]) -> dict[str, str]:
        """The stored name of each of the ``expected`` tensors, those of a new head left out that are not there.

        Raises:
            CheckpointError: one is missing, or there is one that is not expected.
        """
        found: dict[str, str] = {}
        extra = []
        copies = self.copies()
        for stored in self.tensors.tensors:
            name = self._todays_name(stored, expected)
            if name in found:
                raise CheckpointError(f"{self.path} holds tensor {name!r} twice, also as {stored!r}")
            if name in expected or name in copies:
                found[name] = stored
            elif not (
                any(re.search(f"{pattern}$", name) for pattern in self.architecture.ignored)
                or (self.changes_head and name in self.architecture.tensors_of_heads)
            ):
                extra.append(stored)
        for copy, original in copies.items():
            if copy in found:
                found.setdefault(original, found[copy])
        missing = sorted(expected - found.keys())
        if self.changes_head:
            missing = [name for name in missing if name not in self.architecture.tensors_of_heads]
        if missing:
            raise CheckpointError(f"{self.path} lacks {some_tensors(missing)}, which its config.json asks for")
        if extra:
            raise CheckpointError(
                f"{self.path} holds {some_tensors(extra)}, for which a model of its config.json has no place"
            )
        return found

    def copies(self) -> dict[str, str]:
        """Tensors that only repeat another one: where files have both, they must be equal."""
        tied = self.architecture.tied if self.description.share_embeddings_and_output_weights else {}
        return {**self.architecture.copies, **tied}

    def _todays_name(self, stored: str, expected: Set[str]) -> str:
        name = stored
        for old, new in self.architecture.renamed:
            if name.endswith(old):
                name = name.removesuffix(old) + new
        with_prefix = self.architecture.prefix + name
        return with_prefix if name not in expected and with_prefix in expected else name


ADAPTER_CONFIG_NAME = "adapter_config.json"
"""What marks a folder of adapters, as the ``peft`` library has them."""

# People type an organisation and a name, or an old model's name alone, with or without the hub's address.
_HUB_ID = re.compile(
    r"(?:https?:/+)?(?:(?:huggingface\.co|hf\.co)/)?((?:[A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95})/?"
)


def check_model_folder(folder: Path) -> None:
    """Raise CheckpointError, with what to do, if there is no such folder, or one of adapters alone."""
    if not os.path.isdir(folder):
        raise CheckpointError(no_folder(folder))
    if holds_adapters_alone(folder):
        raise CheckpointError(
            f"{folder} holds adapters and no model; give the folder of the model that they were trained on, and "
            f"where a command takes both (generate, chat, eval, classify) --adapter {folder}"
        )


def holds_adapters_alone(folder: Path) -> bool:
    """Whether a folder holds adapters, and no model, though perhaps a copy of their model's configuration."""
    weights = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    return (folder / ADAPTER_CONFIG_NAME).exists() and all(file.name.startswith("adapter_") for file in weights)


def no_folder(folder: Path, hint: str = "") -> str:
    """What to say where there is no such folder: if it may be a model on the Hugging Face hub, how to get one.

    Args:
        folder: the path as the user gave it.
        hint: what else to do.
    """
    exists = os.path.exists(folder)
    said = f"{folder} is not a folder" if exists else f"there is no folder {folder}"
    said += hint and f"; {hint}"
    match = _HUB_ID.fullmatch(str(folder))
    # If the first part of the path is a folder here, the path is misspelt rather than a name on the hub.
    if match is None or exists or (len(folder.parts) > 1 and os.path.isdir(folder.parts[0])):
        return said
    name = match[1].rpartition("/")[2]
    return (
        f"{said}; a model of the Hugging Face hub is downloaded first (pip install huggingface_hub): hf download "
        f"{match[1]} --exclude 'original/*' --local-dir {name}, and its folder given: {name}"
    )
