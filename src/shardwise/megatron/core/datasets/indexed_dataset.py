"""Megatron's indexed files: sequences of tokens in a pair of files, read and written."""

from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from shardwise.core.errors import ConfigError
from shardwise.data.indexed import DTYPES, IndexedTokens, IndexedWriter
from shardwise.megatron.surface import offer

DType = Enum("DType", {dtype.__name__: code for code, dtype in DTYPES.items()})  # type: ignore[misc]


def get_idx_path(path_prefix: str) -> str:
    """Return the name of the index."""
    return f"{path_prefix}.idx"


def get_bin_path(path_prefix: str) -> str:
    """Return the name of the file with the tokens."""
    return f"{path_prefix}.bin"


class _IndexFacts(NamedTuple):
    """What the index of a pair of files says."""

    dtype: Any
    sequence_lengths: NDArray[Any]
    sequence_pointers: NDArray[Any]
    document_indices: NDArray[Any]
    sequence_modes: None = None


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

    @property
    def index(self) -> _IndexFacts:
        """dtype, lengths of the sequences, their first bytes, and the number of the first sequence of each document."""
        return _IndexFacts(self.dtype.type, self.sequence_lengths, self.sequence_pointers, self.document_indices)

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


offer(globals(), "DType")
