"""Megatron's datasets and their builder: the same samples as Megatron's, from its indexed files or from mock documents.

Documents of the mock dataset count 1, 2, 3... modulo the vocabulary size and end with the end-of-document id.
"""

import json
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from shardwise.core.errors import ConfigError
from shardwise.data.blend import blend_order, normalized, parse_blend
from shardwise.data.gpt_samples import GPTSamples, documents_of, split_bounds
from shardwise.data.indexed import DTYPES, IndexedTokens, IndexedWriter, cached_arrays
from shardwise.megatron.absent import absent_names
from shardwise.megatron.surface import offer

__getattr__ = absent_names("datasets.utils", "datasets.blended_megatron_dataset_config")


class Split(Enum):
    """Part of the documents that a dataset uses."""

    train = 0
    valid = 1
    test = 2


def compile_helpers() -> None:
    """Do nothing, because no helper needs compilation."""


def get_blend_from_list(blend: list[str] | None) -> tuple[list[str], list[float] | None] | None:
    """Return the names and the weights of ``["30", "web", "70", "code"]``, or of names alone; None for None.

    Raises:
        ConfigError: only some names have a weight, or one is not more than 0.
    """
    if blend is None:
        return None
    names, weights = parse_blend(blend)
    return [name.strip() for name in names], weights and [float(word) for word in blend[::2]]


DType = Enum("DType", {dtype.__name__: code for code, dtype in DTYPES.items()})  # type: ignore[misc]


def get_idx_path(path_prefix: str) -> str:
    """Return the name of the index."""
    return f"{path_prefix}.idx"


def get_bin_path(path_prefix: str) -> str:
    """Return the name of the file with the tokens."""
    return f"{path_prefix}.bin"


class IndexedDataset(Dataset[NDArray[Any]], IndexedTokens):
    """Sequences of tokens in a pair of files, memory-mapped.

    Args:
        path_prefix: name of both files, without ``.bin`` and ``.idx``.
        multimodal: False; files with modes are not read.
        mmap, fast_cache_load, sequences_per_dataset, dtype_code: no effect: the index says all, and files are mapped.
        object_storage_config, s3_config: None; files are local.

    Raises:
        ConfigError: one of them is set.
        DataError: as ``IndexedTokens``.
    """

    def __init__(
        self,
        path_prefix: str,
        multimodal: bool = False,
        mmap: bool = True,
        object_storage_config: Any = None,
        s3_config: Any = None,
        fast_cache_load: bool = False,
        sequences_per_dataset: tuple[int, int] | None = None,
        dtype_code: int | None = None,
    ) -> None:
        if multimodal or object_storage_config or s3_config:
            raise ConfigError(
                f"IndexedDataset has multimodal={multimodal}, object_storage_config={object_storage_config} and "
                f"s3_config={s3_config}; only local files of tokens without modes are read"
            )
        super().__init__(path_prefix)
        self.path_prefix = path_prefix

    def __reduce__(self) -> Any:
        # Worker processes map the files again.
        return type(self), (self.path_prefix,)

    def __getitem__(self, idx: Any) -> Any:
        """Return the tokens of sequence ``idx``, or for a slice of step 1 a list of them."""
        if isinstance(idx, slice):
            return [self.get(number) for number in range(*idx.indices(len(self)))]
        return self.get(range(len(self))[idx])

    @staticmethod
    def exists(path_prefix: str) -> bool:
        """Whether both files exist."""
        return Path(get_idx_path(path_prefix)).exists() and Path(get_bin_path(path_prefix)).exists()


class IndexedDatasetBuilder:
    """Writes a pair of files for ``IndexedDataset``.

    Args:
        bin_path: the file with the tokens, which is replaced.
        dtype: dtype of the tokens.
        multimodal: False; modes are not written.

    Raises:
        ConfigError: ``multimodal`` is set.
    """

    def __init__(self, bin_path: str, dtype: type[np.number[Any]] = np.int32, multimodal: bool = False) -> None:
        if multimodal:
            raise ConfigError("IndexedDatasetBuilder has multimodal=True; modes of sequences are not written")
        self._writer = IndexedWriter(bin_path, dtype)

    def add_item(self, tensor: Tensor, mode: int = 0) -> None:
        """Add a sequence."""
        self._writer.add(tensor.numpy())

    def add_document(self, tensor: Tensor, lengths: list[int], modes: list[int] | None = None) -> None:
        """Add a document of sequences of these lengths."""
        self._writer.add_document(np.asarray(tensor), lengths)

    def end_document(self) -> None:
        """End a document of items."""
        self._writer.end_document()

    def add_index(self, path_prefix: str) -> None:
        """Add all documents of another pair of files."""
        self._writer.append(path_prefix)

    def finalize(self, idx_path: str) -> None:
        """Write the index."""
        self._writer.finish(idx_path)


@dataclass
class BlendedMegatronDatasetConfig:
    """Settings of all datasets.

    Attributes:
        random_seed: seed of the order of documents and samples.
        sequence_length: number of tokens of a sample.
        blend: names of pairs of indexed files and their weights, or None for weights, which are then the sizes.
        blend_per_split: such a blend, or None, for each split, instead of ``blend`` and ``split``.
        multiple_validation_sets: whether the blend of the validation split gives a list of datasets.
        split: weights of training, validation and test, such as "969,30,1"; of mock data, three equal parts.
        path_to_cache: folder of the indices; if None, ``cache`` below the name of the files.
        tokenizer: tokenizer with ``vocab_size``, ``eod`` and, if it pads, ``pad``.
        mid_level_dataset_surplus: share of samples that each dataset of a weighted blend has more than it gives.
        allow_ambiguous_pad_tokens: whether ``pad`` is padding even if it is another special token too.
        mock: True if there is no blend.
        split_matrix: range of the documents in each split, as fractions.
        full_validation, num_dataset_builder_threads, mmap_bin_files, fast_cache_load, defer_npy_index_mmap: no effect
            on samples.

    Raises:
        ConfigError: a value out of range, or values that contradict each other.
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
    mock: bool = field(init=False, default=False)
    tokenizer: Any = None
    mid_level_dataset_surplus: float = 0.005
    allow_ambiguous_pad_tokens: bool | None = False
    fast_cache_load: bool = False
    defer_npy_index_mmap: bool = False

    def __post_init__(self) -> None:
        if self.sequence_length < 1:
            raise ConfigError(f"sequence_length is {self.sequence_length}; it must be at least 1")
        of_splits = self.blend_per_split or []
        if any(of_splits):
            if self.blend is not None or self.split is not None or len(of_splits) != len(Split):
                raise ConfigError(
                    f"blend_per_split has {len(of_splits)} blends, with blend={self.blend} and split={self.split!r}; "
                    f"give {len(Split)}, or None for a split, and neither of the others"
                )
        elif self.blend is None:
            self.mock, self.split = True, "1,1,1"
        elif self.split is None:
            raise ConfigError("blend needs split, the weights of training, validation and test, such as '969,30,1'")
        for names, weights in [each for each in (self.blend, *of_splits) if each is not None]:
            if weights is not None and len(weights) != len(names):
                raise ConfigError(f"the blend of {len(names)} names has {len(weights)} weights; give one for each")
        if self.split is not None:
            self.split_matrix = split_bounds(self.split)


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


class GPTDataset(Dataset[dict[str, Tensor]]):
    """Samples of indexed documents.

    Args:
        indexed_dataset: the documents.
        dataset_path: name of their files.
        indexed_indices: indices of the documents to use.
        num_samples: minimum number of samples; None means those of one epoch.
        index_split: split of this dataset.
        config: settings of the samples.

    Raises:
        ConfigError: the documents are too short for a sample.
    """

    def __init__(
        self,
        indexed_dataset: Any,
        dataset_path: str | None,
        indexed_indices: NDArray[Any],
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        self.dataset, self.dataset_path, self.indices = indexed_dataset, dataset_path, indexed_indices
        self.num_samples, self.index_split, self.config = num_samples, index_split, config
        self._pad = self._padding()
        self._samples = GPTSamples.build(
            indexed_dataset,
            indexed_indices,
            config.sequence_length,
            num_samples,
            config.random_seed,
            extra=int(config.add_extra_token_to_sequence),
            keeps_partial=index_split is Split.valid and not config.drop_last_partial_validation_sequence,
            cache=self._cache(),
        )
        self.document_index, self.sample_index = self._samples.document_index, self._samples.sample_index
        self.shuffle_index = self._samples.shuffle_index

    def _cache(self) -> str | None:
        if self.config.path_to_cache is None and not self.config.mock and self.dataset_path is not None:
            return f"{self.dataset_path}/cache/{type(self).__name__}_indices"
        return self.config.path_to_cache

    def _padding(self) -> int:
        tokenizer = self.config.tokenizer
        pad: int = getattr(tokenizer, "pad", -1)
        named = getattr(tokenizer, "special_tokens_dict", None) or {}
        others = [value for name, value in named.items() if name != "pad_token"]
        others = others or [getattr(tokenizer, name, None) for name in ("eos", "eod")]
        if pad not in others or self.config.allow_ambiguous_pad_tokens:
            return pad
        warnings.warn(
            f"the padding {pad} of the tokenizer is another special token too, so it is learned", stacklevel=4
        )
        return -1

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """Number of documents."""
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: GPTDatasetConfig) -> Any:
        """Open the documents."""
        assert dataset_path is not None
        return IndexedDataset(dataset_path)

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def __getitem__(self, idx: int | None) -> dict[str, Tensor]:
        """Return sample ``idx``; None gives a sample with a loss mask of 0, to fill a batch.

        Returns:
            ``tokens``, ``labels``, ``loss_mask`` and ``position_ids`` of shape ``[s]``, and ``attention_mask``
            ``[1, s, s]``, True where a token must not see another.
        """
        config, s = self.config, self.config.sequence_length
        pad = self._pad
        text = torch.from_numpy(self._samples.tokens(idx or 0, pad))
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


class MockGPTDataset(GPTDataset):
    """Samples of mock documents; ``dataset_path`` has no effect."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: GPTDatasetConfig) -> Any:
        """Make the documents."""
        return MockGPTLowLevelDataset(config.tokenizer)


class BlendedDataset(Dataset[dict[str, Any]]):
    """Samples of several datasets, in proportion to weights at any place.

    Args:
        datasets: the datasets, of one class and split.
        weights: weight of each.
        size: number of samples; None for exactly ``weights[i]`` samples of dataset ``i``.
        config: settings.

    Raises:
        ConfigError: a weight is not more than 0, or a dataset is too small for its weight.
    """

    def __init__(
        self, datasets: list[Any], weights: list[Any], size: int | None, config: BlendedMegatronDatasetConfig
    ) -> None:
        if len(weights) != len(datasets):
            raise ConfigError(f"{len(datasets)} datasets have {len(weights)} weights; give one for each")
        shares = normalized(weights)
        self.datasets, self.config, self.size = datasets, config, size
        limits = [int(each) for each in weights] if size is None else None
        self.weights: list[Any] = shares if limits is None else weights
        total = sum(limits) if limits is not None else size
        assert total is not None
        if limits is not None:
            shares = [limit / total for limit in limits]
        self.dataset_index, self.dataset_sample_index = cached_arrays(
            config.path_to_cache,
            ("dataset_index", "dataset_sample_index"),
            json.dumps([shares, total, limits]).encode(),
            [(total,)] * 2,
            lambda: blend_order(shares, total, limits),
        )
        for number, dataset in enumerate(datasets):
            count = int((self.dataset_index == number).sum())
            if count > len(dataset):
                raise ConfigError(
                    f"the blend takes {count} samples of dataset {number}, which has {len(dataset)}; raise "
                    f"mid_level_dataset_surplus from {config.mid_level_dataset_surplus}, e.g. ten-fold"
                )

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        """Return sample ``idx``, and the number of its dataset as ``dataset_id``."""
        number = self.dataset_index[idx]
        return {"dataset_id": number, **self.datasets[number][int(self.dataset_sample_index[idx])]}


class BlendedMegatronDatasetBuilder:
    """Builds the datasets of training, validation and test.

    Args:
        cls: class of the datasets: ``GPTDataset``, ``MockGPTDataset``, or a custom class with the same functions.
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
        """Build a dataset for each split, None for a split without documents or on a rank that builds none.

        Every rank calls. The first rank builds first, and leaves the indices for the others.

        Raises:
            ConfigError: a blend with weights has no size, or has too few samples.
        """
        if not dist.is_initialized():
            return self._build()
        built = self._build() if (first := dist.get_rank() == 0) and self.is_built_on_rank() else None
        dist.barrier()
        if not first and self.is_built_on_rank():
            built = self._build()
        return [None] * len(Split) if built is None else built

    def _build(self) -> list[Any]:
        config = self.config
        if config.mock:
            return self._splits(None, config.split_matrix, self.sizes)
        if config.blend is not None:
            return self._blended(config.blend, config.split_matrix, self.sizes)
        found: list[Any] = []
        for split, blend in zip(Split, config.blend_per_split, strict=True):
            bounds: list[Any] = [(0.0, 1.0) if each is split else None for each in Split]
            if blend is None:
                found.append(None)
            elif config.multiple_validation_sets and split is Split.valid and len(blend[0]) > 1:
                found.append([self._splits(name, bounds, self.sizes)[split.value] for name in blend[0]])
            else:
                # The weight of a single name has no effect here, unlike that of a blend of all splits.
                blend = (blend[0], None) if len(blend[0]) == 1 else blend
                found.append(self._blended(blend, bounds, self.sizes)[split.value])
        return found

    def _blended(self, blend: Any, bounds: Sequence[Any], sizes: Sequence[int | None]) -> list[Any]:
        names, weights = blend
        if weights is None and len(names) == 1:
            return self._splits(names[0], bounds, sizes)
        if weights is None:
            parts = [self._splits(name, bounds, [None] * len(Split)) for name in names]
            found: list[Any] = []
            for number, size in enumerate(sizes):
                of_split = [part[number] for part in parts]
                if of_split[0] is None:
                    found.append(None)
                    continue
                counts = [len(each) for each in of_split]
                total = None if size is None else min(size, sum(counts))
                found.append(BlendedDataset(of_split, counts, total, self.config))
            return found
        wanted = [size for size, each in zip(sizes, bounds, strict=True) if each is not None]
        if None in wanted:
            raise ConfigError(f"a blend with weights needs the size of each split, and the sizes are {list(sizes)}")
        surplus = 1 + self.config.mid_level_dataset_surplus
        taken = [[math.ceil((size or 0) * share) for size in sizes] for share in normalized(weights)]
        parts = [
            self._splits(name, bounds, [math.ceil(count * surplus) for count in counts])
            for name, counts in zip(names, taken, strict=True)
        ]
        return [
            None
            if each is None
            else BlendedDataset(
                [part[number] for part in parts], weights, sum(counts[number] for counts in taken), self.config
            )
            for number, each in enumerate(bounds)
        ]

    def _splits(self, name: str | None, bounds: Sequence[Any], sizes: Sequence[int | None]) -> list[Any]:
        documents = self.cls.build_low_level_dataset(name, self.config)
        count = self.cls.numel_low_level_dataset(documents)
        return [
            None
            if bounds[split.value] is None
            else self.cls(documents, name, documents_of(bounds[split.value], count), size, split, self.config)
            for split, size in zip(Split, sizes, strict=True)
        ]


offer(globals(), "DType")
