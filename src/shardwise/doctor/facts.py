"""The facts of a rank's recording: the JSON that a ``Recorder`` writes, with the types that a reader expects."""

from typing import Annotated, Any, Literal, TypedDict

from shardwise.core.typed_json import Count

VERSION = 1
"""Version of the format."""

MOST_AXES = 8
"""Largest number of axes; the layouts to try grow exponentially with it."""

# -1 for what a step has once, and for a tensor that is not recorded.
_Number = Annotated[int, -1]
_What = Literal["input", "output", "used", "input gradient", "output gradient", "accumulated", "gradient", "updated"]

Intervals = list[list[tuple[Count, Count]]]
"""For each rank, its intervals ``[start, stop]`` of a dimension."""


class ParameterFacts(TypedDict):
    """A parameter of the model."""

    shape: list[Count]
    is_trained: bool


class UpdateFacts(TypedDict):
    """An update of the optimizer."""

    step: Count
    clip_factor: float | None
    was_clipped: bool


class _StatedInputs(TypedDict, total=False):
    stated: bool
    micro_batch: Count


class InputFacts(_StatedInputs):
    """Hashes of the rows of a micro-batch's inputs; without ``micro_batch`` if no forward followed their statement."""

    step: Count
    rows: dict[str, list[str]]
    num_labels: Count | None


# A keyword of Python is no name of a field.
_Class = TypedDict("_Class", {"class": str})


class CallFacts(_Class):
    """A call of a module; ``inputs`` and ``outputs`` are positions in ``tensors``."""

    what: str
    name: str
    step: Count
    micro_batch: Count
    call: Count
    leaf: str
    inputs: list[_Number]
    outputs: list[_Number]
    moves: list[tuple[str, Count]]


class _Layouts(TypedDict, total=False):
    layouts: dict[str, list[Any]]


class TensorFacts(_Layouts):
    """A recorded tensor: its ``places.Key``, and the form of its sketch."""

    what: _What
    name: str
    step: Count
    micro_batch: _Number
    call: Count
    leaf: str
    shape: list[Count]
    dtype: str
    strides: list[Annotated[int, 1]]


class RankFacts(TypedDict):
    """The facts of a rank."""

    torch: str
    rank: Count
    world_size: Annotated[int, 1]
    axes: dict[str, tuple[Count, Annotated[int, 1]]]
    steps: Count
    perturb: int | None
    modules: dict[str, str]
    parameters: dict[str, ParameterFacts]
    dropped: list[str]
    inputs: list[InputFacts]
    updates: list[UpdateFacts]
    calls: list[CallFacts]
    tensors: list[TensorFacts]
