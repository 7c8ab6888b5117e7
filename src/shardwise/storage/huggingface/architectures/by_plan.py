"""Model types without a table here: tensors of files are parameters of the model of transformers, by their names."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch

from shardwise.models.by_plan import library
from shardwise.models.config import ModelConfig
from shardwise.models.transformer.heads import Heads
from shardwise.storage.huggingface.architectures.architecture import Architecture, ExpertNames
from shardwise.storage.huggingface.fields import Fields
from shardwise.storage.huggingface.mapping import Box, Boxes, Composition, Piece, Shape, Source, Table


@dataclass(frozen=True, kw_only=True)
class ByPlan(Architecture):
    """The architecture of a folder whose model transformers builds, and its own plan splits."""

    of_modules: Table

    @property
    def fused(self) -> Table:
        """The names in modules of transformers, which have one tensor for all experts."""
        return self.of_modules

    def table_with(self, expert_names: ExpertNames | None) -> Table:
        """Return the table of files, or that of modules for "fused"."""
        return self.of_modules if expert_names == "fused" else self.table

    def table_of(self, folder: Mapping[str, Shape]) -> Table:
        """Return the table for the names and the sizes of the folder's tensors."""
        assert isinstance(self.table, _Names)
        names = {self.prefix + name: shape for name, shape in folder.items()} | dict(folder)
        for longer, start in self.longer_starts:
            names |= {start + name.removeprefix(longer): names[name] for name in folder if name.startswith(longer)}
        return replace(self.table, folder=names)

    def read(self, fields: Fields) -> ModelConfig:
        """Read the sizes of the model, and keep all fields; raise ConfigError if transformers cannot build it."""
        return library.describe(fields.values, fields.where)

    def untied(self, model: ModelConfig) -> ModelConfig:
        """Change the kept fields, too."""
        assert model.transformers_config is not None
        values: dict[str, Any] = json.loads(model.transformers_config)
        for table in (values, *(each for each in values.values() if isinstance(each, dict))):
            if table is values or "tie_word_embeddings" in table:
                table["tie_word_embeddings"] = False
        return replace(super().untied(model), transformers_config=json.dumps(values, sort_keys=True))

    def with_vocabulary(self, model: ModelConfig, size: int) -> ModelConfig:
        """Change the kept fields, too."""
        return library.with_vocabulary(model, size)

    def is_of_vocabulary(self, model: ModelConfig, key: str) -> bool:
        """Return whether it is a parameter of the embedding or the head of transformers."""
        return key in library.vocabulary_parameters(model)

    def written(self, model: ModelConfig, dtype: torch.dtype | None) -> dict[str, Any]:
        """Return the ``config.json`` that ``read`` kept, for weights of ``dtype``, without names of a folder's code."""
        assert model.transformers_config is not None
        values: dict[str, Any] = json.loads(model.transformers_config)
        left_out = {"auto_map", *(("dtype", "torch_dtype") if dtype is not None else ())}
        values = {name: value for name, value in values.items() if name not in left_out}
        values["architectures"] = list(self.classes)
        return values if dtype is None else values | {"torch_dtype": str(dtype).removeprefix("torch.")}


@dataclass(frozen=True)
class _Names(Mapping[str, Source]):
    """The table of tensors by the names of transformers, in files if ``of_files``, else in its modules.

    Files have a tensor for each expert and some older names. ``folder`` has the shapes of a folder's tensors, if it is
    known: parameters that it has by the names of modules are read as they are.
    """

    model: ModelConfig
    of_files: bool
    folder: Mapping[str, Shape] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Source:
        def compose(shape: Shape, heads: Heads, values: Mapping[str, str]) -> Composition:
            zeros = (0,) * len(shape)
            names, how = library.stored_as(self.model, key) if self.of_files else ((key,), "whole")
            found = [self.folder.get(name.replace("*", "0")) for name in names]
            if not how or (key in self.folder and None in found):
                names, how = (key,), "whole"
            if how == "experts":
                rows = shape[1] // len(names)
                boxes = [
                    Box(name.replace("*", str(number)), (number, at * rows, *zeros[2:]), (1, rows, *shape[2:]), True)
                    for number in range(shape[0])
                    for at, name in enumerate(names)
                ]
            elif how == "rows":
                sizes = library.rows_of_parts(self.model, key, shape[0])
                stored = [each[0] for each in found if each]
                if len(stored) == len(names) and sum(stored) == shape[0]:
                    sizes = tuple(stored)
                starts = [0, *accumulate(sizes)]
                boxes = [
                    Box(name, (start, *zeros[1:]), (size, *shape[1:]))
                    for name, start, size in zip(names, starts, sizes, strict=False)
                ]
            elif len(shape) in (1, 2):
                return Composition(shape, (Piece(names[0], 0, shape[0]),))
            else:
                boxes = [Box(names[0], zeros, shape)]
            return Boxes(shape, (), boxes=tuple(boxes))

        return compose

    def __iter__(self) -> Iterator[str]:
        return iter(("",))

    def __len__(self) -> int:
        return 1


def by_plan(model: ModelConfig) -> ByPlan:
    """Return the architecture of a model that ``library.describe`` described."""
    kind = library.class_of(model)
    # Of models that are tied, each copy's name after its original's.
    tied = getattr(kind, "_tied_weights_keys", None) or {}
    ignored = getattr(kind, "_keys_to_ignore_on_load_unexpected", None) or ()
    return ByPlan(
        model_type=json.loads(model.transformers_config or "{}")["model_type"],
        classes=(kind.__name__,),
        settings={},
        fixed={},
        prefix=f"{kind.base_model_prefix}.",
        table=_Names(model, True),
        of_modules=_Names(model, False),
        longer_starts=library.longer_starts(model),
        tied={copy: original for copy, original in tied.items() if re.fullmatch(r"[\w.]+", copy + original)},
        ignored=(*(rf"(?:{each}).*" for each in ignored), r"\.rotary_emb\.inv_freq"),
    )
