"""Record the experts that routers choose in the steps of a training, and replay them at any layout.

A folder has ``routing.json``, the facts of the model, and a file for each step: for each layer of experts those of all
tokens, ``[samples, length, k]`` in the order of the global batch, and a hash of each sample's tokens.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor, nn

from shardwise.core.atomic_files import cannot_write, write_atomically
from shardwise.core.communication.agreement import agree, check_same
from shardwise.core.communication.collectives import all_reduce
from shardwise.core.errors import CheckpointError, ConfigError, DataError, ShardingError
from shardwise.core.json_text import read_json, shown
from shardwise.core.sequence_view import SequenceView
from shardwise.core.tensor_files import read_box, read_header
from shardwise.core.typed_json import Count, problem
from shardwise.models.description import ModelChunks
from shardwise.models.experts.moe import MoELayer
from shardwise.models.experts.router import Reroute
from shardwise.models.language_model import LanguageModel
from shardwise.models.transformer.layer import TransformerLayer
from shardwise.models.transformer_model import TransformerModel

_FACTS, _SAMPLES = "routing.json", "samples"
_STEP = re.compile(r"step_(\d{8,})\.safetensors")
_INTEGERS = ("U8", "I8", "I16", "I32", "I64")


class RoutingFacts(TypedDict):
    """Facts of a model: its number of experts, those of a token, and the layers that have experts, from 1."""

    num: Count
    per_token: Count
    layers: list[Count]


class _Routing:
    """Common part of a recorder and of a replay, which have its arguments."""

    def __init__(self, model: LanguageModel | ModelChunks, folder: str | PathLike[str]) -> None:
        self._folder = Path(folder)
        self._chunks = [each for each in model.modules() if isinstance(each, TransformerModel)]
        groups, config = self._chunks[0].groups, self._chunks[0].config
        if config.experts is None:
            raise ConfigError("the model has no experts, so there is no routing to record or replay")
        self._groups = [group for group in (groups.tp, groups.dp, groups.pp) if group is not None]
        self._rank, self._num_ranks = groups.data.samples
        self._numbers: dict[nn.Module, int] = {
            layer.mlp: layer.layer_number
            for chunk in self._chunks
            for layer in chunk.block.layers
            if isinstance(layer, TransformerLayer) and isinstance(layer.mlp, MoELayer)
        }
        self._device = next(model.parameters()).device
        experts = config.experts
        # Layers have numbers from 1.
        self._layers = [number for number in range(1, config.num_layers + 1) if experts.in_layer(number)]
        self._facts: dict[str, Any] = {"num": experts.num, "per_token": experts.per_token, "layers": self._layers}
        # Of this rank in a step: the samples of each chunk's passes, and their lengths.
        self._counts: list[int] = []
        self._lengths: set[int] = set()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record or replay a step, the forward passes in training mode within a ``with`` block; every rank calls.

        The samples of data-parallel ranks follow each other in the global batch, and those of a rank's passes too.
        """
        agree(lambda: self._begin(number), group=self._groups)
        self._counts, self._lengths = [0] * len(self._chunks), set()
        for place, chunk in enumerate(self._chunks):
            chunk.rerouting = self._rerouting(place)
        try:
            yield
        finally:
            for chunk in self._chunks:
                chunk.rerouting = None
        self._finish_step(number)

    def check_steps(self, steps: range) -> None:
        """Raise ConfigError if one of these steps cannot be recorded or replayed."""
        raise NotImplementedError

    def resume(self, first_step: int) -> None:
        """Prepare to record or replay a run that goes on at a step."""

    def _begin(self, number: int) -> None:
        raise NotImplementedError

    def _pass(self, first: int, b: int, length: int, hashes: Tensor | None) -> Reroute:
        """Begin a forward pass of ``b`` samples; ``first`` is the number of this rank's samples before, in the step."""
        raise NotImplementedError

    def _finish_step(self, number: int) -> None:
        raise NotImplementedError

    def _rerouting(self, place: int) -> Any:
        def begin(sequence: SequenceView, b: int, ids: Tensor | None) -> Reroute:
            first, length = self._counts[place], sequence.whole_length
            self._counts[place] += b
            self._lengths.add(length)
            # Positive numbers of 63 bits.
            hashes = None if ids is None else torch.tensor([int(each, 16) >> 1 for each in row_hashes(ids)])
            return self._pass(first, b, length, hashes)

        return begin

    def _path(self, number: int) -> Path:
        return self._folder / f"step_{number:08d}.safetensors"

    def _check_facts(self) -> None:
        path = self._folder / _FACTS
        try:
            facts = read_json(path)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read: {error}; record the routing again") from error
        if (wrong := problem(facts, RoutingFacts)) is not None:
            raise DataError(f"{path} is damaged: its {wrong.removeprefix('.')}; record the routing again")
        if facts != self._facts:
            raise ConfigError(
                f"{self._folder} has routing of a model with {_described(facts)}, and this model has "
                f"{_described(self._facts)}; give the folder of this model"
            )


class RoutingRecorder(_Routing):
    """Records the experts of each token in all layers. The run keeps its bits.

    A rank holds the choices of its samples in a step, four bytes for each. The first rank gathers and writes them,
    layer by layer.

    Args:
        model: the model, whose groups come from a Topology; with pipeline stages this rank's stage or its chunks.
        folder: folder for the first rank's files; it may have other steps of the same model.

    Raises:
        ConfigError: the model has no experts, or the folder has routing of another model, or the step already.
        ShardingError: the samples of a step have different lengths, or chunks saw different numbers of them.
        UnwritableError: the folder cannot be written to.
    """

    def __init__(self, model: LanguageModel | ModelChunks, folder: str | PathLike[str]) -> None:
        super().__init__(model, folder)
        self._experts: dict[tuple[int, int], Tensor] = {}
        self._hashes: dict[int, Tensor] = {}
        self._writes = all(group.rank() == 0 for group in self._groups)
        agree(self._write_facts, group=self._groups)

    def check_steps(self, steps: range) -> None:
        """Raise ConfigError if the folder has one of these steps already."""
        for path in map(self._path, steps):
            if self._writes and path.exists():
                raise ConfigError(f"{path} exists already; record into another folder, or delete it")

    def resume(self, first_step: int) -> None:
        """Delete the recorded steps from ``first_step`` on, which a resumed run records again."""
        if not self._writes or not self._folder.is_dir():
            return
        for path in self._folder.iterdir():
            step = _STEP.fullmatch(path.name)
            if step and int(step[1]) >= first_step:
                try:
                    path.unlink()
                except OSError as error:
                    raise cannot_write(path, error.strerror or str(error), "folder for the routing") from error

    def _begin(self, number: int) -> None:
        self.check_steps(range(number, number + 1))
        self._experts, self._hashes = {}, {}

    def _pass(self, first: int, b: int, length: int, hashes: Tensor | None) -> Reroute:
        if hashes is not None:
            self._hashes[first] = hashes
        shape = (b, length, self._facts["per_token"])

        def reroute(layer: nn.Module, chosen: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
            place = self._numbers[layer], first
            if place not in self._experts:
                self._experts[place] = torch.zeros(shape, dtype=torch.int32, device=self._device)
            # A recomputation writes the same experts again.
            self._experts[place][samples, positions] = chosen.int()
            return chosen

        return reroute

    def _finish_step(self, number: int) -> None:
        facts = sorted(set(self._counts)), sorted(self._lengths)
        for group in self._groups:
            check_same(facts, "the samples of a step and their lengths", group=group)
        (own, *other_counts), (length, *other_lengths) = (each or [0] for each in facts)
        if other_counts or other_lengths or not own:
            raise ShardingError(
                f"step {number} has {facts[0]} samples of lengths {facts[1]} on each rank; routing is recorded of "
                "passes in training mode through all chunks, with samples of one length"
            )
        mine = slice(self._rank * own, (self._rank + 1) * own)
        num, k = self._facts["num"], self._facts["per_token"]
        tensors: dict[str, Tensor] = {}
        for layer in self._layers:
            whole = torch.zeros(self._num_ranks * own, length, k, dtype=torch.int32, device=self._device)
            parts = [self._experts[place] for place in sorted(self._experts) if place[0] == layer]
            if parts:
                whole[mine] = torch.cat(parts)
            # Each token of a layer was on one rank, or on several with the same experts, as in exact mode.
            for group in self._groups:
                whole = all_reduce(whole, group=group, op=dist.ReduceOp.MAX, may_overwrite=True)
            if self._writes:
                whole = whole.sort(dim=-1).values
                tensors[str(layer)] = whole.to("cpu", torch.uint8 if num <= 256 else torch.int32)
        hashes = torch.zeros(self._num_ranks * own, dtype=torch.int64, device=self._device)
        if self._hashes:
            hashes[mine] = torch.cat([self._hashes[first] for first in sorted(self._hashes)]).to(self._device)
        for group in self._groups:
            hashes = all_reduce(hashes, group=group, op=dist.ReduceOp.MAX, may_overwrite=True)
        tensors[_SAMPLES] = hashes.cpu()
        agree(lambda: self._write(self._path(number), save(tensors)), group=self._groups)

    def _write_facts(self) -> None:
        if (self._folder / _FACTS).exists():
            self._check_facts()
        else:
            self._write(self._folder / _FACTS, json.dumps(self._facts).encode())

    def _write(self, path: Path, content: bytes) -> None:
        if not self._writes:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(path, lambda file: file.write(content))
        except OSError as error:
            raise cannot_write(self._folder, error.strerror or str(error), "folder for the routing") from error


class RoutingReplay(_Routing):
    """Sends each token to the experts of a recorded run, so that no choice differs where scores are close.

    Weights are those of this run's scores, and give routers their gradients. Layout and dtype may be others than when
    the routing was recorded; model and samples are the same.

    Args:
        model: the model, whose groups come from a Topology; with pipeline stages this rank's stage or its chunks.
        folder: folder of a ``RoutingRecorder``, which every rank reads.

    Raises:
        ConfigError: the model has no experts, the folder has routing of another model or lacks the step, or the step
            has other samples.
        DataError: a file is damaged.
    """

    def __init__(self, model: LanguageModel | ModelChunks, folder: str | PathLike[str]) -> None:
        super().__init__(model, folder)
        self._experts: dict[int, Tensor] = {}
        self._hashes = torch.zeros(0)
        self._length = 0
        # True once a token has an expert twice.
        self._repeats = torch.zeros((), dtype=torch.bool, device=self._device)
        agree(self._check_facts, group=self._groups)

    def check_steps(self, steps: range) -> None:
        """Raise ConfigError unless the folder has all of these steps."""
        for number in steps:
            if not self._path(number).exists():
                raise ConfigError(
                    f"{self._folder} has no routing of step {number}; replay fewer steps, or record more of them"
                )

    def _begin(self, number: int) -> None:
        self.check_steps(range(number, number + 1))
        path = self._path(number)
        try:
            self._experts, self._hashes = self._read(path)
        except CheckpointError as error:
            raise DataError(f"{error}; record the routing again") from error
        self._repeats.zero_()

    def _read(self, path: Path) -> tuple[dict[int, Tensor], Tensor]:
        """Read and check this rank's part of a step."""

        def damaged(reason: str) -> DataError:
            return DataError(f"{path} is damaged: {reason}; record the routing again")

        stored, num, k = read_header(path), self._facts["num"], self._facts["per_token"]
        if missing := [name for name in (_SAMPLES, *map(str, self._layers)) if name not in stored]:
            raise damaged(f"it lacks {missing[0]!r}")
        samples, layers = stored[_SAMPLES], [stored[str(number)] for number in self._layers]
        if samples.dtype != "I64" or len(samples.shape) != 1:
            raise damaged(
                f"{_SAMPLES!r} is {samples.dtype} of shape {shown(list(samples.shape))}, not I64 of one dimension"
            )
        self._length = layers[0].shape[1] if len(layers[0].shape) == 3 else 0
        shape = (*samples.shape, self._length, k)
        for each in layers:
            if each.dtype not in _INTEGERS or each.shape != shape or not self._length:
                raise damaged(
                    f"layer {each.name} is {each.dtype} of shape {shown(list(each.shape))}; it must be integers "
                    f"[{samples.shape[0]} samples, length, {k} experts of a token], of one length in all layers"
                )
        own, rest = divmod(samples.shape[0], self._num_ranks)
        if rest:
            raise ConfigError(
                f"{path} has {samples.shape[0]} samples, which {self._num_ranks} data-parallel ranks cannot share; "
                "replay on a number of ranks that divides them"
            )
        start, experts = self._rank * own, {}
        for number in self._numbers.values():
            chosen = read_box(stored[str(number)], [start, 0, 0], [own, *shape[1:]]).to(self._device, torch.int64)
            if chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < num:
                raise damaged(f"layer {number} names experts that the model does not have: they are 0 to {num - 1}")
            chosen = chosen.sort(dim=-1).values
            # A place without a token, such as padding, has zeros.
            if bool(((chosen[..., 1:] == chosen[..., :-1]).any(-1) & chosen.any(-1)).any()):
                raise damaged(f"layer {number} has an expert twice for one token")
            experts[number] = chosen
        return experts, read_box(samples, [start], [own])

    def _pass(self, first: int, b: int, length: int, hashes: Tensor | None) -> Reroute:
        room = len(self._hashes)
        if first + b > room or length != self._length:
            raise ConfigError(
                f"a pass has samples {first + 1} to {first + b} of a rank, of length {length}, and the routing in "
                f"{self._folder} is of {room} a rank, of length {self._length}; replay the batches that were recorded"
            )
        if hashes is not None and not torch.equal(hashes, self._hashes[first : first + b]):
            raise ConfigError(
                f"the tokens of a batch are not those whose routing {self._folder} has; replay with the same data, "
                "seed and batch size"
            )

        def reroute(layer: nn.Module, chosen: Tensor, samples: Tensor, positions: Tensor) -> Tensor:
            experts = self._experts[self._numbers[layer]][first + samples, positions]
            # Other repetitions than of zeros were found before.
            self._repeats |= (experts[:, 1:] == experts[:, :-1]).any()
            return experts

        return reroute

    def _finish_step(self, number: int) -> None:
        def check() -> None:
            if any(count != len(self._hashes) for count in self._counts):
                raise ConfigError(
                    f"step {number} had {min(self._counts)} samples on a rank, and the routing in {self._folder} is of "
                    f"{len(self._hashes)}; replay the batches that were recorded"
                )
            if bool(self._repeats):
                raise DataError(
                    f"{self._path(number)} is damaged: it has expert 0 twice for a token; record the routing again"
                )

        agree(check, group=self._groups)


def _described(facts: dict[str, Any]) -> str:
    layers = ", ".join(map(str, facts["layers"]))
    return f"{facts['num']} experts, {facts['per_token']} of a token, in layers {layers}"


def row_hashes(tensor: Tensor) -> list[str]:
    """Return a hash of each row."""
    rows = tensor.detach().cpu().reshape(tensor.size(0) if tensor.dim() > 1 else 1, -1).to(torch.int64)
    return [hashlib.sha256(row.numpy().tobytes()).hexdigest()[:16] for row in rows]
