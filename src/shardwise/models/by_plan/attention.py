"""The heads of a transformers attention module: their split over ranks, and the attributes that count them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import nn

from shardwise.core.errors import ConfigError
from shardwise.core.sharding import Interval, ParamLayout, balanced_sizes
from shardwise.models.transformer.heads import HeadSplit, split_heads

# Attributes of an attention module that its forward reads; each becomes the number of this rank.
_QUERIES = ("num_heads", "num_attention_heads", "n_heads", "num_local_heads")
_GROUPS = ("num_key_value_heads", "num_kv_heads")
_PER_GROUP = ("num_key_value_groups", "n_rep")
_WIDTHS = ("head_dim", "head_size", "qk_head_dim")
# Projections with rows, or columns, for each key-value head; all others are of query heads.
_OF_GROUPS = {"k_proj", "v_proj", "dt_proj", "k_norm", "v_norm", "k_layernorm"}
# Modules that plans may leave out, and the split projection whose output they read: norms of heads, activations.
READERS = {
    "q_norm": "q_proj",
    "k_norm": "k_proj",
    "v_norm": "v_proj",
    "q_layernorm": "q_proj",
    "k_layernorm": "k_proj",
    "act_fn": "up_proj",
}


@dataclass(frozen=True)
class AttentionHeads:
    """The heads of one attention module.

    Attributes:
        queries, groups: numbers of query and of key-value heads, over all ranks.
        split: the heads of each rank.
    """

    queries: int
    groups: int
    split: HeadSplit

    def layout(self, shape: tuple[int, ...], dim: int, name: str) -> ParamLayout:
        """Return the layout of a parameter that has indices for each head along ``dim``.

        Args:
            shape: shape of the whole parameter.
            dim: dimension of the heads.
            name: name of the parameter's module in the attention module.

        Raises:
            ConfigError: the dimension is not a multiple of the number of heads.
        """
        of_groups = name.split(".")[0] in _OF_GROUPS
        number, runs = (self.groups, self.split.groups) if of_groups else (self.queries, self.split.queries)
        if shape[dim] % number:
            raise ConfigError(
                f"{name}: dimension {dim} of {list(shape)} is not a multiple of the {number} "
                f"{'key-value ' if of_groups else ''}heads, so it cannot be split at heads; use one rank"
            )
        width = shape[dim] // number
        intervals = [[(start * width, stop * width)] for start, stop in runs]
        return ParamLayout.of_intervals(shape, dim, intervals)

    def rewrite_(self, module: nn.Module, rank: int) -> None:
        """Set the attributes of an attention module that count heads to the numbers of ``rank``."""
        (first, last), (start, stop) = self.split.queries[rank], self.split.groups[rank]
        for names, whole, own in (
            (_QUERIES, self.queries, last - first),
            (_GROUPS, self.groups, stop - start),
            (_PER_GROUP, self.queries // self.groups, (last - first) // (stop - start)),
        ):
            for name in names:
                if getattr(module, name, None) == whole:
                    setattr(module, name, own)


def heads_of(module: nn.Module, config: Any, num_ranks: int) -> AttentionHeads | None:
    """Return the heads of an attention module; None for another module.

    Args:
        module: the parent of planned projections.
        config: the configuration of the model, for a module without its own.

    Raises:
        ConfigError: there are fewer query heads than ranks, or no split at key-value heads.
    """
    if not any(hasattr(module, name) for name in (*_QUERIES, *_GROUPS, *_PER_GROUP, *_WIDTHS)):
        return None
    config = getattr(module, "config", config)
    index = getattr(module, "layer_idx", None)
    if getattr(config, "is_heterogeneous", False) and type(index) is int:
        config = config.per_layer_config[index]
    # Numbers of one owner belong together: some layers have other heads than the configuration says.
    owner = module if _number(module, _QUERIES) else config
    queries = _number(owner, _QUERIES)
    if queries is None:
        return None
    if owner is module and _number(module, _GROUPS) is None and _number(config, _QUERIES) == queries:
        owner = config
    per_group = _number(module, _PER_GROUP)
    groups = queries // per_group if per_group else _number(owner, _GROUPS) or queries
    if queries % groups:
        raise ConfigError(
            f"{type(module).__name__} has {queries} heads, not a multiple of its {groups} key-value heads; use one rank"
        )
    return AttentionHeads(queries, groups, _split(queries, groups, num_ranks))


def _number(owner: Any, names: tuple[str, ...]) -> int | None:
    found = (getattr(owner, name, None) for name in names)
    return next((value for value in found if type(value) is int and value > 0), None)


def _split(queries: int, groups: int, num_ranks: int) -> HeadSplit:
    """Split heads so that all key-value heads of a rank have the same number of query heads on it."""
    split = split_heads(queries, groups, num_ranks)
    if all(len(set(split.queries_of_groups(rank))) == 1 for rank in range(num_ranks)):
        return split
    # One key-value head for each rank: several ranks share the queries of one.
    sizes: list[int] = []
    runs: list[Interval] = []
    for group, ranks in enumerate(balanced_sizes(num_ranks, groups)):
        sizes += balanced_sizes(queries // groups, ranks)
        runs += [(group, group + 1)] * ranks
    if 0 in sizes:
        raise ConfigError(
            f"{queries} heads with {groups} key-value heads cannot be split over {num_ranks} tensor-parallel ranks so "
            f"that each rank has queries of one key-value head; use at most {groups} ranks, or a multiple"
        )
    ends = list(accumulate(sizes))
    return HeadSplit(queries // groups, tuple(runs), tuple(zip([0, *ends], ends, strict=False)))
