"""How it is tried what an exact run relies on: something is computed in two ways, which must have the same bits."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from shardwise.core.errors import REPORT, ConfigError

_REPORT = REPORT.format("other devices refuse it too")
# A prime.
_NUM_RANDOM = 65537
# No tensor of a trial is made wider than this, unless it is what one rank of a step has anyway.
MOST_ELEMENTS = 1 << 24

_Result = TypeVar("_Result")


class OtherBits(Exception):  # noqa: N818  (It is not an error before all trials have been made.)
    """Two ways that must have the same bits have not; says which."""


def compare(found: Tensor, expected: Tensor, what: str) -> None:
    """Raise OtherBits, which names ``what``, if any element differs."""
    if not torch.equal(found, expected):
        different = int((found != expected).sum())
        raise OtherBits(f"{what} has other bits: {different:,} of {expected.numel():,} elements")


def require_same_bits(found: Tensor, expected: Tensor, what: str) -> None:
    """Raise a ConfigError that names ``what`` if any element differs."""
    try:
        compare(found, expected, what)
    except OtherBits as error:
        raise ConfigError(
            f"exact: on this device ({expected.device}) {error}; use another device, other sizes, or no "
            f"--exact; {_REPORT}"
        ) from None


def with_threads(number: int, function: Callable[[], _Result]) -> _Result:
    """What ``function`` returns when so many threads compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        return function()
    finally:
        torch.set_num_threads(threads)


def on_one_thread(function: Callable[[], _Result]) -> _Result:
    """What ``function`` returns when one thread computes."""
    return with_threads(1, function)


def on_several_threads(function: Callable[[], _Result]) -> _Result:
    """What ``function`` returns on all threads of this rank, and two at least: another layout's ranks may have more."""
    return with_threads(max(2, torch.get_num_threads()), function)


def powers_of_two(most: int) -> Iterator[int]:
    """1, 2, 4, ... up to ``most``: how many ranks there may be."""
    number = 1
    while number <= most:
        yield number
        number *= 2


def how_split(ranks: int) -> str:
    """What is said of a trial with so many ranks' shards, which are computed on one thread."""
    return "on one thread" if ranks == 1 else f"on each of {ranks} ranks"


@dataclass
class Trials:
    """What has been tried on a device.

    Attributes:
        device: on which.
        dtype: of the run's products.
        parts: ``exact_parts`` of the run.
    """

    device: torch.device
    dtype: torch.dtype
    parts: int
    _failures: list[str] = field(default_factory=list)
    _fitting: int = 0

    def __post_init__(self) -> None:
        self._fitting = self.parts
        self.generator = torch.Generator(self.device).manual_seed(0)
        self._some = torch.randn(_NUM_RANDOM, generator=self.generator, device=self.device).to(self.dtype)

    def numbers(self, *shape: int) -> Tensor:
        """Random ones. They are repeated, which takes less time than new ones, and their number divides no width."""
        size = math.prod(shape)
        return self._some.repeat(1 + size // _NUM_RANDOM)[:size].view(shape)

    def ids(self, most: int, *shape: int) -> Tensor:
        """Random integers from 0 to ``most - 1``."""
        return torch.randint(most, shape, generator=self.generator, device=self.device)

    def run(self, trial: Callable[[int], None]) -> None:
        """Try something that raises OtherBits, given a number of parts; what fails is kept for ``finish``."""
        try:
            trial(self.parts)
        except OtherBits as error:
            self._failures.append(str(error))
            fitting = self.parts // 2
            while fitting and not _succeeds(trial, fitting):
                fitting //= 2
            self._fitting = min(self._fitting, fitting)

    def finish(self) -> None:
        """Raise a ConfigError that names all that failed."""
        if not self._failures:
            return
        remedy = f"the largest exact-parts that works is {self._fitting}" if self._fitting else "no exact-parts works"
        raise ConfigError(
            f"exact: on this device ({self.device}) {'; '.join(self._failures)}; {remedy}; use "
            f"{'it, ' if self._fitting else ''}another device, other sizes, or no --exact; {_REPORT}"
        )


def _succeeds(trial: Callable[[int], None], parts: int) -> bool:
    try:
        trial(parts)
    except OtherBits:
        return False
    return True
