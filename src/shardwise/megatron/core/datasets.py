"""Megatron's mock dataset and its builder: the same samples as Megatron's, without files.

Documents of the mock dataset count 1, 2, 3... modulo the vocabulary size and end with the end-of-document id. As in any
GPT dataset, documents are concatenated in a shuffled order, for as many epochs as needed, and cut into samples, which
are shuffled again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from shardwise.core.errors import ConfigError
from shardwise.megatron.surface import offer

# The last epoch is shuffled separately if less than this share of its samples is needed.
_SHARE_OF_AN_EPOCH = 0.8


class Split(Enum):
    """Part of the documents that a dataset uses."""

    train = 0
    valid = 1
    test = 2


def compile_helpers() -> None:
    """Do nothing, because no helper needs compilation."""


@dataclass
class BlendedMegatronDatasetConfig:
    """Settings of all datasets.

    Attributes:
        random_seed: seed of the order of documents and samples.
        sequence_length: number of tokens of a sample.
        blend, blend_per_split: not supported, because Megatron's indexed files are not read here.
        split: weights of training, validation and test; three equal parts, as for Megatron's mock data.
        tokenizer: tokenizer with ``vocab_size``, ``eod`` and, if it pads, ``pad``.
        mock: True.
        split_matrix: range of the documents in each split, as fractions.
        multiple_validation_sets, full_validation, num_dataset_builder_threads, path_to_cache, mmap_bin_files,
            mid_level_dataset_surplus, allow_ambiguous_pad_tokens, fast_cache_load, defer_npy_index_mmap: no effect:
            there are no files.

    Raises:
        ConfigError: a value out of range, or data from files.
    """

    random_seed: int
    sequence_length: int
    blend: Any = None
    blend_per_split: Any = None
    multiple_validation_sets: bool | None = None
    full_validation: bool | None = None
    split: str | None = None
    split_matrix: list[tuple[float, float] | None] = field(init=False, default_factory=list)
    num_dataset_builder_threads: int = 1
    path_to_cache: str | None = None
    mmap_bin_files: bool = True
    mock: bool = field(init=False, default=True)
    tokenizer: Any = None
    mid_level_dataset_surplus: float = 0.005
    allow_ambiguous_pad_tokens: bool | None = False
    fast_cache_load: bool = False
    defer_npy_index_mmap: bool = False

    def __post_init__(self) -> None:
        if self.blend is not None or any(self.blend_per_split or ()):
            raise ConfigError(
                "blend and blend_per_split name Megatron's indexed files, which are not read here; leave them out for "
                "mock data, or read text with shardwise.data"
            )
        if self.sequence_length < 1:
            raise ConfigError(f"sequence_length is {self.sequence_length}; it must be at least 1")
        self.split = "1,1,1"
        self.split_matrix = [(0.0, 1 / 3), (1 / 3, 2 / 3), (2 / 3, 1.0)]


@dataclass
class GPTDatasetConfig(BlendedMegatronDatasetConfig):
    """Settings of a dataset for GPT.

    Attributes:
        reset_position_ids: whether positions restart after each end of a document.
        reset_attention_mask: whether tokens see only their own document.
        eod_mask_loss: whether the loss mask is 0 at the end of a document.
        create_attention_mask: whether samples have an ``attention_mask``.
        drop_last_partial_validation_sequence: whether the validation dataset lacks the sample of the last tokens that
            do not fill one; otherwise it is padded.
        add_extra_token_to_sequence: whether the last label is the token after the sample; otherwise it is padding.

    Raises:
        ConfigError: as for the base class; or the tokenizer or one of the first three settings is missing.
    """

    reset_position_ids: bool | None = None
    reset_attention_mask: bool | None = None
    eod_mask_loss: bool | None = None
    create_attention_mask: bool = True
    drop_last_partial_validation_sequence: bool = True
    add_extra_token_to_sequence: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tokenizer", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
            if getattr(self, name) is None:
                raise ConfigError(f"GPTDatasetConfig needs {name}; it was not given")


class MockGPTLowLevelDataset:
    """Documents of random lengths that count from 1.

    Args:
        tokenizer: tokenizer with ``vocab_size`` and ``eod``.

    Attributes:
        sequence_lengths: length of each document.
    """

    seed = 0
    size = 100_000
    max_sequence_length = 4096

    def __init__(self, tokenizer: Any) -> None:
        self.vocab_size: int = tokenizer.vocab_size
        self.eod_token: int = tokenizer.eod
        generator = np.random.default_rng(seed=self.seed)
        self.sequence_lengths = generator.integers(1, self.max_sequence_length, size=self.size, dtype=np.int32)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, idx: int) -> NDArray[np.int64]:
        return self.get(idx)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> NDArray[np.int64]:
        """Return ``length`` tokens of document ``idx`` from ``offset``, or all from there if None."""
        whole = int(self.sequence_lengths[idx])
        stop = whole if length is None else min(offset + length, whole)
        tokens = (np.arange(offset, stop, dtype=np.int64) + 1) % self.vocab_size
        if stop == whole and tokens.size:
            tokens[-1] = self.eod_token
        return tokens


class MockGPTDataset(Dataset[dict[str, Tensor]]):
    """Samples of mock documents.

    Args:
        dataset: the documents.
        dataset_path: no effect, because there is no file.
        indexed_indices: indices of the documents to use.
        num_samples: minimum number of samples; None means those of one epoch.
        index_split: split of this dataset.
        config: settings of the samples.

    Raises:
        ConfigError: the documents are too short for a sample.
    """

    def __init__(
        self,
        dataset: MockGPTLowLevelDataset,
        dataset_path: str | None,
        indexed_indices: NDArray[Any],
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        self.dataset, self.indices, self.num_samples = dataset, indexed_indices, num_samples
        self.index_split, self.config = index_split, config
        s, extra = config.sequence_length, int(config.add_extra_token_to_sequence)
        per_epoch = int(dataset.sequence_lengths[indexed_indices].sum(dtype=np.int64))
        if per_epoch <= extra:
            raise ConfigError(f"{len(indexed_indices)} documents of {per_epoch} tokens hold no sample of {s} tokens")
        num_epochs = 1 if num_samples is None else max(1, -(-(num_samples * s + extra) // per_epoch))
        keeps_partial = index_split is Split.valid and not config.drop_last_partial_validation_sequence
        total = (num_epochs * per_epoch - extra + (s - 1) * keeps_partial) // s
        # Samples before the last epoch, which are shuffled separately if only a small part of the last epoch is needed.
        first = ((num_epochs - 1) * per_epoch - extra) // s if num_epochs > 1 else total
        apart = num_epochs > 1 and (num_samples or 0) - first < int(_SHARE_OF_AN_EPOCH * ((per_epoch - extra) // s))
        random = np.random.RandomState(config.random_seed)
        epochs = [num_epochs - 1, 1] if apart else [num_epochs]
        self.document_index = np.concatenate([random.permutation(np.tile(indexed_indices, n)) for n in epochs])
        runs = [(0, first), (first, total)] if apart else [(0, total)]
        self.shuffle_index = np.concatenate([random.permutation(np.arange(*run, dtype=np.uint32)) for run in runs])
        # Start of each document in the concatenation of all.
        lengths = dataset.sequence_lengths[self.document_index]
        self._begins = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: MockGPTLowLevelDataset) -> int:
        """Number of documents."""
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: GPTDatasetConfig) -> MockGPTLowLevelDataset:
        """Make the documents."""
        return MockGPTLowLevelDataset(config.tokenizer)

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def __getitem__(self, idx: int | None) -> dict[str, Tensor]:
        """Return sample ``idx``; None gives a sample with a loss mask of 0, to fill a batch.

        Returns:
            ``tokens``, ``labels``, ``loss_mask`` and ``position_ids`` of shape ``[s]``, and ``attention_mask``
            ``[1, s, s]``, True where a token must not see another.
        """
        config, s = self.config, self.config.sequence_length
        text = torch.from_numpy(self._tokens(int(self.shuffle_index[idx or 0]) * s))
        pad = getattr(config.tokenizer, "pad", -1)
        if config.add_extra_token_to_sequence:
            tokens, labels = text[:-1].clone(), text[1:].clone()
        else:
            tokens, labels = text, torch.cat([text[1:], text.new_tensor([pad])])
        loss_mask = torch.ones(s)
        if config.eod_mask_loss:
            loss_mask[tokens == config.tokenizer.eod] = 0.0
        loss_mask[labels == pad] = 0.0
        if idx is None:
            loss_mask.zero_()
        # Number of documents that end before each token.
        document = (tokens == config.tokenizer.eod).cumsum(0).roll(1)
        document[0] = 0
        position_ids = torch.arange(s)
        if config.reset_position_ids:
            position_ids -= torch.searchsorted(document, document)
        tokens[tokens == pad] = 0
        labels[labels == pad] = 0
        sample = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": position_ids}
        if config.create_attention_mask:
            hidden = torch.ones(s, s, dtype=torch.bool).triu(1)
            if config.reset_attention_mask:
                hidden |= document[:, None] != document
            sample["attention_mask"] = hidden[None]
        return sample

    def _tokens(self, start: int) -> NDArray[np.int64]:
        """Return a sample's tokens, from index ``start`` in the concatenated documents, with padding after the last."""
        length = self.config.sequence_length + int(self.config.add_extra_token_to_sequence)
        stop = min(start + length, int(self._begins[-1]))
        padding = np.full(start + length - stop, getattr(self.config.tokenizer, "pad", -1), dtype=np.int64)
        parts = []
        number = int(np.searchsorted(self._begins, start, side="right")) - 1
        while start < stop:
            begin, end = int(self._begins[number]), int(self._begins[number + 1])
            parts.append(self.dataset.get(self.document_index[number], start - begin, min(stop, end) - start))
            start, number = end, number + 1
        return np.concatenate([*parts, padding])


class BlendedMegatronDatasetBuilder:
    """Builds the datasets of training, validation and test.

    Args:
        cls: class of the datasets: ``MockGPTDataset``, or a custom class with the same functions.
        sizes: minimum number of samples of each dataset; None means those of one epoch.
        is_built_on_rank: returns whether this rank builds datasets.
        config: settings of the samples.
    """

    def __init__(
        self,
        cls: type[Any],
        sizes: Sequence[int | None],
        is_built_on_rank: Callable[[], bool],
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        if len(sizes) != len(Split):
            raise ConfigError(f"sizes are {list(sizes)}; give one for each of {', '.join(each.name for each in Split)}")
        self.cls, self.sizes, self.is_built_on_rank, self.config = cls, sizes, is_built_on_rank, config

    def build(self) -> list[Any]:
        """Build a dataset for each split; on a rank that builds none, return None for each."""
        if not self.is_built_on_rank():
            return [None] * len(Split)
        documents = self.cls.build_low_level_dataset(None, self.config)
        count = self.cls.numel_low_level_dataset(documents)
        datasets = []
        for split, share, size in zip(Split, self.config.split_matrix, self.sizes, strict=True):
            assert share is not None
            indices = np.arange(round(share[0] * count), round(share[1] * count), dtype=np.int32)
            datasets.append(self.cls(documents, None, indices, size, split, self.config))
        return datasets


offer(globals())
