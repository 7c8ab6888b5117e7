"""Settings of Megatron's datasets, and the splits of their documents."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from shardwise.core.errors import ConfigError
from shardwise.data.blend import parse_blend
from shardwise.data.gpt_samples import split_bounds
from shardwise.megatron.surface import offer


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


offer(globals())
