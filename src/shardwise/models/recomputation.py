"""Settings of recomputation, shared by the config of a model, a run and a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from shardwise.core.errors import ConfigError

Granularity = Literal["none", "full", "selective"]
RecomputedModule = Literal["core_attn", "layernorm", "mlp", "mlp_act"]

RECOMPUTE_MODULES = get_args(RecomputedModule)


@dataclass(frozen=True)
class Recomputation:
    """Parts of a model that the backward recomputes: less memory for more time, the same bits.

    Attributes:
        granularity: "full" saves only the inputs of layers, and takes about a third more time; "selective" recomputes
            the parts of every layer that modules names.
        method: with "full": "uniform" saves the input of every num_layers-th layer and recomputes all layers; "block"
            recomputes only the first num_layers layers of each stage (of each chunk, with interleaving).
        num_layers: see method.
        modules: with "selective": attention between its projections (core_attn), the norms before attention and
            MLP (layernorm), the MLP (mlp), or only its activation (mlp_act).

    Raises:
        ConfigError: a value is out of range, or is set although the granularity does not use it.

    Source: Chen et al. 2016 (arXiv:1604.06174); Korthikanti et al. 2022 (arXiv:2205.05198), section 5.
    """

    granularity: Granularity = "none"
    method: Literal["uniform", "block"] = "uniform"
    num_layers: int = 1
    modules: tuple[RecomputedModule, ...] = ("core_attn",)

    def __post_init__(self) -> None:
        granularity = self.granularity
        if granularity not in get_args(Granularity):
            raise ConfigError(f"recompute.granularity is {granularity!r}; it must be 'none', 'full' or 'selective'")
        if self.method not in ("uniform", "block"):
            raise ConfigError(f"recompute.method is {self.method!r}; it must be 'uniform' or 'block'")
        if type(self.num_layers) is not int or self.num_layers < 1:
            raise ConfigError(f"recompute.num-layers is {self.num_layers!r}; it must be an integer of at least 1")
        for reader, names in (("full", ("method", "num_layers")), ("selective", ("modules",))):
            for name in names if granularity != reader else ():
                if (value := getattr(self, name)) != getattr(Recomputation, name):
                    name = f"recompute.{name.replace('_', '-')}"
                    raise ConfigError(f"{name} {value} needs --recompute.granularity {reader} (it is {granularity!r})")
        if isinstance(self.modules, list):
            object.__setattr__(self, "modules", tuple(self.modules))
        if not isinstance(self.modules, tuple):
            raise ConfigError(f"recompute.modules is {self.modules!r}; it must be a tuple of names")
        if not self.modules or not set(self.modules) <= set(RECOMPUTE_MODULES):
            raise ConfigError(
                f"recompute.modules names {', '.join(map(repr, self.modules)) or 'nothing'}; it must name at least one "
                f"of {', '.join(RECOMPUTE_MODULES)}"
            )
        if {"mlp", "mlp_act"} <= set(self.modules):
            raise ConfigError("recompute.modules has 'mlp' and 'mlp_act', which is a part of it; choose one of them")

    def recomputes(self, module: str) -> bool:
        """Return whether this part of every layer is recomputed."""
        return self.granularity == "selective" and module in self.modules

    @property
    def is_of_each_layer(self) -> bool:
        """True if only the input of each layer is saved."""
        return self.granularity == "full" and self.method == "uniform" and self.num_layers == 1

    def __str__(self) -> str:
        if self.granularity == "selective":
            return f"selective ({', '.join(self.modules)})"
        if self.granularity == "full":
            return f"full ({self.method}, {self.num_layers} layer{'s' if self.num_layers > 1 else ''})"
        return "none"
