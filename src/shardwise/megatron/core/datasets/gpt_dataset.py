"""Megatron's samples for GPT, from indexed files or from mock documents.

Documents of the mock dataset count 1, 2, 3... modulo the vocabulary size and end with the end-of-document id.
"""

import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from shardwise.data.gpt_samples import GPTSamples
from shardwise.megatron.core.datasets.config import GPTDatasetConfig, Split
from shardwise.megatron.core.datasets.indexed_dataset import IndexedDataset
from shardwise.megatron.surface import offer


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


offer(globals())
