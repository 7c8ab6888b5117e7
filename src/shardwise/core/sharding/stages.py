"""Which transformer layers each pipeline stage holds.

A model of ``num_stages * num_chunks`` parts runs through part 0, part 1 and so on; stage ``p`` holds, as its chunk
``c``, part ``c * num_stages + p``. Source: Narayanan et al. 2021 (arXiv:2104.04473), section 2.2.
"""

from shardwise.core.errors import ConfigError
from shardwise.core.sharding.balanced import balanced_sizes, intervals_of_sizes


def stage_layers(
    num_layers: int,
    num_stages: int,
    *,
    num_chunks: int = 1,
    first: int | None = None,
    last: int | None = None,
    count_embedding: bool = False,
    count_loss: bool = False,
) -> tuple[tuple[range, ...], ...]:
    """The layers, counted from 0, of each chunk of each stage.

    Every part holds at least one layer, and all parts about the same number: those that come first in the model hold
    one more where the layers do not divide.

    >>> stage_layers(5, 2)
    ((range(0, 3),), (range(3, 5),))
    >>> stage_layers(4, 2, num_chunks=2)
    ((range(0, 1), range(2, 3)), (range(1, 2), range(3, 4)))
    >>> stage_layers(6, 2, count_embedding=True, count_loss=True)  # 1 + 3, 3 + 1
    ((range(0, 3),), (range(3, 6),))
    >>> [len(chunks[0]) for chunks in stage_layers(7, 3, count_embedding=True, count_loss=True)]
    [2, 3, 2]

    Args:
        num_layers: of the whole model.
        num_stages: pipeline-parallel ranks.
        num_chunks: parts of the model on each stage, over 1 for interleaved schedules.
        first: layers of the first stage, over all its chunks; dealt out like the others' if None.
        last: layers of the last stage, likewise.
        count_embedding: the embedding, in the first part, weighs as much as a layer.
        count_loss: output layer and loss, in the last part, weigh as much as a layer.

    Returns:
        ``[stage][chunk]``, ranges of consecutive layers.

    Raises:
        ConfigError: more parts than layers, or ``first`` and ``last`` that leave no such split.
    """
    _check(num_layers, num_stages, num_chunks, first, last)
    if first is not None and count_embedding:
        raise ConfigError(f"the first stage is given {first} layers, so the embedding cannot be counted; choose one")
    if last is not None and count_loss:
        raise ConfigError(f"the last stage is given {last} layers, so the loss cannot be counted; choose one")
    num_parts = num_stages * num_chunks
    given: dict[int, int] = {}
    for stage, count in ((0, first), (num_stages - 1, last)):
        if count is not None:
            sizes = balanced_sizes(count, num_chunks)
            given |= {chunk * num_stages + stage: size for chunk, size in enumerate(sizes)}
    free = [part for part in range(num_parts) if part not in given]
    weights = {part: int(count_embedding and part == 0) + int(count_loss and part == num_parts - 1) for part in free}
    counts = given | _dealt_out(num_layers - sum(given.values()), weights)
    intervals = intervals_of_sizes([counts[part] for part in range(num_parts)])
    return tuple(
        tuple(range(*intervals[chunk * num_stages + stage]) for chunk in range(num_chunks))
        for stage in range(num_stages)
    )


def _dealt_out(num_layers: int, weights: dict[int, int]) -> dict[int, int]:
    """``num_layers`` over the parts, one to each and then always to the lightest, the first of several."""
    counts = dict.fromkeys(weights, 1)
    for _ in range(num_layers - len(counts)):
        lightest = min(counts, key=lambda part: (counts[part] + weights[part], part))
        counts[lightest] += 1
    return counts


def _check(num_layers: int, num_stages: int, num_chunks: int, first: int | None, last: int | None) -> None:
    if num_stages < 1 or num_chunks < 1:
        raise ConfigError(f"{num_stages} pipeline stages of {num_chunks} chunks: there must be at least 1 of each")
    if num_layers < num_stages * num_chunks:
        of_chunks = f" of {num_chunks} chunks" if num_chunks > 1 else ""
        raise ConfigError(
            f"{num_layers} layers cannot be dealt out to {num_stages} pipeline stages{of_chunks}: each needs at least "
            "one layer; use fewer stages or chunks, or more layers"
        )
    fixed = {"first": first, "last": last}
    if num_stages == 1:
        wrong = {name: count for name, count in fixed.items() if count not in (None, num_layers)}
        if wrong:
            raise ConfigError(f"there is one pipeline stage, with all {num_layers} layers, and it was given {wrong}")
        return
    for name, count in fixed.items():
        if count is not None and count < num_chunks:
            raise ConfigError(
                f"the {name} stage is given {count} layers for its {num_chunks} chunks; give at least one each"
            )
    given = [count for count in fixed.values() if count is not None]
    left, others = num_layers - sum(given), (num_stages - len(given)) * num_chunks
    if left < others or (others == 0 and left != 0):
        raise ConfigError(
            f"of {num_layers} layers the first stage is given {first} and the last {last}, which leaves {left} for "
            f"the other {num_stages - len(given)} stages of {num_chunks} chunks; each chunk needs at least one layer"
        )
