"""Megatron's blends of datasets, and the builder of those of training, validation and test."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch.utils.data import Dataset

from shardwise.core.errors import ConfigError
from shardwise.data.blend import blend_order, normalized
from shardwise.data.gpt_samples import documents_of
from shardwise.data.indexed import cached_arrays
from shardwise.megatron.core.datasets.config import BlendedMegatronDatasetConfig, Split
from shardwise.megatron.surface import offer


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


offer(globals())
