"""What of a model is computed again in the backward, in place of being kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardwise.core.errors import ConfigError

RecomputeGranularity = Literal["full", "selective"]
RecomputeMethod = Literal["uniform", "block"]

RECOMPUTE_MODULES = ("core_attn", "layernorm", "mlp", "mlp_act")


@dataclass
class RecomputeConfig:
    """What of a model is computed again in the backward, in place of being kept. Results have the same bits.

    Attributes:
        recompute_granularity: ``"full"`` keeps the input of layers only; ``"selective"`` recomputes parts of every
            layer, those of ``recompute_modules``. Nothing is recomputed if None.
        recompute_method: with ``"full"``: ``"uniform"`` keeps the input of every ``recompute_num_layers``-th layer of a
            stage and recomputes all of them; ``"block"`` recomputes the first ``recompute_num_layers`` layers of each
            stage (of each chunk, with interleaving), one by one, and keeps what the others need.
        recompute_num_layers: see ``recompute_method``.
        recompute_modules: with ``"selective"``: of ``"core_attn"`` (attention between its projections), ``"layernorm"``
            (the output of the norms before attention and MLP), ``"mlp"`` (the whole MLP) and ``"mlp_act"`` (the output
            of the MLP's activation); ``("core_attn",)`` if None.

    Raises:
        ConfigError: a value out of range, or two that contradict each other.

    Source: Chen et al. 2016 (arXiv:1604.06174); Korthikanti et al. 2022 (arXiv:2205.05198), section 5.
    """

    recompute_granularity: RecomputeGranularity | None = None
    recompute_method: RecomputeMethod | None = None
    recompute_num_layers: int | None = None
    recompute_modules: Sequence[str] | None = None

    def check_recompute_(self) -> None:
        """Raise ConfigError for what contradicts itself; give ``recompute_modules`` its default."""
        granularity, method, number = self.recompute_granularity, self.recompute_method, self.recompute_num_layers
        if granularity not in (None, "full", "selective"):
            raise ConfigError(
                f"recompute_granularity is {granularity!r}; it must be 'full', 'selective', or None for nothing"
            )
        if granularity == "full":
            if method not in ("uniform", "block"):
                raise ConfigError(
                    f"recompute_method is {method!r}; recompute_granularity 'full' needs 'uniform' or 'block'"
                )
            if number is None or number < 1:
                raise ConfigError(
                    f"recompute_num_layers is {number}; recompute_granularity 'full' needs a number of at least 1"
                )
        elif method is not None or number is not None:
            raise ConfigError(
                f"recompute_method {method!r} and recompute_num_layers {number} say which layers are recomputed whole, "
                f"and recompute_granularity is {granularity!r}; set it to 'full', or leave them out"
            )
        if granularity != "selective":
            if self.recompute_modules is not None:
                raise ConfigError(
                    f"recompute_modules {list(self.recompute_modules)} are parts of layers, and recompute_granularity "
                    f"is {granularity!r}; set it to 'selective', or leave them out"
                )
            return
        modules = ("core_attn",) if self.recompute_modules is None else tuple(self.recompute_modules)
        unknown = [name for name in modules if name not in RECOMPUTE_MODULES]
        if isinstance(self.recompute_modules, str) or unknown or not modules:
            raise ConfigError(
                f"recompute_modules is {self.recompute_modules!r}; it must name at least one of "
                f"{', '.join(RECOMPUTE_MODULES)}"
            )
        if "mlp" in modules and "mlp_act" in modules:
            raise ConfigError("recompute_modules has 'mlp' and 'mlp_act', which is a part of it; choose one of them")
        self.recompute_modules = modules

    def recomputes(self, module: str) -> bool:
        """Whether a part of every layer is recomputed by itself."""
        return self.recompute_granularity == "selective" and module in (self.recompute_modules or ())
