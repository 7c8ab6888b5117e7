r"""Sampling of the next token from logits that are split over the ranks.

Every rank holds ``x``, the logits of its part of the vocabulary. Sampling from ``softmax(x / T)`` reduces to an argmax
(the Gumbel-max trick): with ``u`` uniform on (0, 1), one number for each id,

    argmax_i  x_i + T · (-log(-log u_i))

is a sample. So greedy decoding and sampling need one small all-gather: every rank's best score and its id. Top-k
gathers k candidates per rank. Top-p without top-k gathers a few candidates per rank, and more until their probabilities
reach the sum.

Every rank draws ``u`` for the *whole* vocabulary from a generator with the same seed, so the noise of an id does not
depend on ranks or on positions in a list. The same seed gives the same text at every tensor-parallel size. If the
logits at two sizes differ in their last bits, the choice can differ only between scores that are as close. The noise is
drawn on the generator's device, and devices draw different numbers, so CPU and GPU give different texts.

Nothing but top-p without top-k synchronizes with a GPU before the choice is read. If no token can be chosen, its id is
-1 until then.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication.collectives import all_gather
from shardwise.core.errors import ConfigError, DivergenceError, ShardingError
from shardwise.core.sharding import balanced_range, balanced_sizes


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters, applied in the order penalties, temperature, top-k, top-p, min-p.

    Attributes:
        temperature: divisor of the logits; below 1 favours likely tokens, 0 always takes the most likely one.
        top_k: sample from this many most likely tokens; 0 is off.
        top_p: sample from the smallest set of most likely tokens whose probabilities reach this sum, in (0, 1]; 1 is
            off.
        min_p: sample from tokens whose probability is at least this share of the most likely one's; 0 is off.
        repetition_penalty: divisor of the logits over 0, and factor of those under 0, of all tokens of the prompt and
            of the text; 1 is off.
        presence_penalty: subtracted from the logits of all tokens of the text, without the prompt; 0 is off.

    Raises:
        ConfigError: a value is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ConfigError(f"temperature is {self.temperature}; it must be a number of at least 0 (0 is greedy)")
        if self.top_k < 0:
            raise ConfigError(f"top_k is {self.top_k}; it must be at least 0 (0 is off)")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; it must be over 0 and at most 1 (1 is off)")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p is {self.min_p}; it must be from 0 (off) to 1")
        if not (self.repetition_penalty > 0 and math.isfinite(self.repetition_penalty)):
            raise ConfigError(f"repetition_penalty is {self.repetition_penalty}; it must be over 0 (1 is off)")
        if not math.isfinite(self.presence_penalty):
            raise ConfigError(f"presence_penalty is {self.presence_penalty}; it must be a number (0 is off)")

    @property
    def has_penalties(self) -> bool:
        """True if earlier tokens change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0


GREEDY = Sampling(temperature=0.0)
"""Greedy decoding."""

# Candidates of each rank for top-p without top-k, at first; and the factor of their number if these do not suffice.
_FIRST_CANDIDATES = 64
_GROWTH = 8


class History(NamedTuple):
    """Tokens before the next one of a sequence, for penalties: of its prompt, and of the text after it."""

    prompt: Sequence[int]
    text: Sequence[int]


def _argmax(scores: Tensor, vocab_size: int, group: ProcessGroup) -> Tensor:
    """Return the id of each row's highest score over all ranks; ties go to the lowest id, at every number of ranks."""
    start = _check_shard(scores, vocab_size, group)
    scores = _without_nan(scores)
    # Unlike topk, argmax guarantees the first of equal values.
    index = scores.argmax(dim=-1, keepdim=True)
    best = torch.stack((scores.gather(1, index), (index + start).double()), dim=-1)
    values, ids = all_gather(best, group=group, dim=1).unbind(-1)
    return _pick_highest(values, ids)


def sample_next_token(
    logits: Tensor, sampling: Sampling, *, vocab_size: int, group: ProcessGroup, generator: torch.Generator
) -> Tensor:
    """Choose a token for each row of split logits; greedy, the lowest id of equal logits.

    Layout V -> I: one all-gather of 16 bytes per row and rank (times ``min(k, v/t)`` with top-k, ``v/t`` with top-p
    alone).

    Args:
        logits: ``[b, v/t]``, this rank's part of the vocabulary by the balanced rule; not modified.
        sampling: sampling parameters.
        vocab_size: size of the whole vocabulary.
        group: the ranks that split it.
        generator: generator on the CPU or the logits' device, in the same state on every rank; draws ``b * vocab_size``
            numbers (greedy: none).

    Returns:
        ``[b]`` ids, int64, the same on every rank.

    Raises:
        ShardingError: ``logits`` is not this rank's part of the vocabulary.
        DivergenceError: the logits are infinite or NaN; on every rank.
    """
    return checked_choice(choose_next_token(logits, sampling, vocab_size=vocab_size, group=group, generator=generator))


def choose_next_token(
    logits: Tensor,
    sampling: Sampling,
    *,
    vocab_size: int,
    group: ProcessGroup,
    generator: torch.Generator | Sequence[torch.Generator],
    histories: Sequence[History] = (),
) -> Tensor:
    """Like ``sample_next_token``, but without synchronization: the id is -1 if the logits are infinite or NaN.

    With several generators, each row has a separate one and draws the numbers that it would draw alone. Penalties read
    the rows' ``histories``.
    """
    if sampling.has_penalties:
        logits = _penalised(logits, sampling, histories, _check_shard(logits, vocab_size, group))
    if sampling.temperature == 0 or sampling.top_k == 1:
        return _argmax(logits, vocab_size, group)
    start = _check_shard(logits, vocab_size, group)
    generators = [generator] if isinstance(generator, torch.Generator) else generator
    shape = logits.size(0) // len(generators), vocab_size
    uniform = torch.cat([torch.rand(shape, generator=g, dtype=torch.float64, device=g.device) for g in generators])
    # Multiply the noise by the temperature. Dividing the logits would be equivalent, but may overflow if it is small.
    noise = (-uniform.log()).log_().mul_(-sampling.temperature).to(logits.device)
    if sampling.top_k == 0 and sampling.top_p == 1:
        scores = logits + noise[:, start : start + logits.size(1)]
        if sampling.min_p > 0:
            logits = _without_nan(logits)
            best = all_gather(logits.amax(dim=1, keepdim=True), group=group, dim=1).amax(dim=1, keepdim=True)
            scores = scores.masked_fill(logits < best + _reach(sampling), -torch.inf)
        return _argmax(scores, vocab_size, group)
    logits = _without_nan(logits)
    if sampling.top_k > 0:
        values, ids = _gather_candidates(logits, start, sampling.top_k, vocab_size, group)
        if sampling.top_p < 1:
            values = _keep_top_p(values, sampling)
    else:
        values, ids = _likeliest(logits, start, sampling, vocab_size, group)
    if sampling.min_p > 0:
        values = values.masked_fill(values < values.amax(dim=1, keepdim=True) + _reach(sampling), -torch.inf)
    return _pick_highest(values + noise.gather(1, ids.long()), ids)


def _reach(sampling: Sampling) -> float:
    """Return by how much a logit may be below the highest one under min-p, a number of at most 0."""
    return sampling.temperature * math.log(sampling.min_p)


def _penalised(logits: Tensor, sampling: Sampling, histories: Sequence[History], start: int) -> Tensor:
    # Of logits in 16 bits as of fp32 ones, since rounding would make some of them equal.
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)

    def own(tokens: set[int]) -> Tensor:
        """Return the indices of tokens of this rank's part of the vocabulary."""
        found = [token - start for token in tokens if start <= token < start + logits.size(1)]
        return torch.tensor(found, dtype=torch.int64, device=logits.device)

    for row, history in zip(logits, histories, strict=True):
        text = set(history.text)
        if sampling.repetition_penalty != 1:
            index = own(text.union(history.prompt))
            seen, penalty = row[index], sampling.repetition_penalty
            row[index] = torch.where(seen < 0, seen * penalty, seen / penalty)
        if sampling.presence_penalty != 0:
            row[own(text)] -= sampling.presence_penalty
    return logits


def checked_choice(ids: Tensor) -> Tensor:
    """Synchronize with the device, check ``ids``, and return them unchanged.

    Raises:
        DivergenceError: an id is -1.
    """
    if bool((ids < 0).any()):
        raise DivergenceError(
            "the model's logits are infinite or not numbers, so no token can be chosen or measured: its weights have "
            "diverged; use an earlier checkpoint or train with a lower learning rate"
        )
    return ids


def _check_shard(scores: Tensor, vocab_size: int, group: ProcessGroup) -> int:
    """Check the shape of this rank's scores; return the first id of its part of the vocabulary."""
    t, rank = group.size(), group.rank()
    if vocab_size < t:
        raise ShardingError(f"a vocabulary of {vocab_size} ids is too small for {t} ranks; each needs at least one")
    start, stop = balanced_range(vocab_size, t, rank)
    if scores.dim() != 2 or scores.size(1) != stop - start:
        raise ShardingError(
            f"rank {rank} of {t} holds {stop - start} of {vocab_size} ids; pass scores of shape "
            f"[batch, {stop - start}], not {list(scores.shape)}"
        )
    return start


def _without_nan(scores: Tensor) -> Tensor:
    """Convert to fp64, and NaN to infinity, which wins the argmax on every rank, so that all raise the same error."""
    scores = scores.double()
    return torch.where(scores.isnan(), torch.inf, scores)


def _pick_highest(values: Tensor, ids: Tensor) -> Tensor:
    """Return the id of each row's highest value, -1 if not finite; ties go to the first, so ``ids`` must be sorted."""
    index = values.argmax(dim=-1, keepdim=True)
    chosen = ids.gather(1, index).masked_fill(~values.gather(1, index).isfinite(), -1)
    return chosen.squeeze(1).long()


def _gather_candidates(
    logits: Tensor, start: int, top_k: int, vocab_size: int, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Return the ``top_k`` highest logits over all ranks and their ids, both ``[b, k]`` in fp64, sorted by id."""
    ids = torch.arange(start, start + logits.size(1), device=logits.device).double().expand_as(logits)
    candidates = _top_k_in_order(torch.stack((logits, ids), dim=-1), top_k)
    sizes = [min(top_k, size) for size in balanced_sizes(vocab_size, group.size())]
    candidates = all_gather(candidates, group=group, dim=1, sizes=sizes)
    values, ids = _top_k_in_order(candidates, top_k).unbind(-1)
    return values, ids


def _top_k_in_order(candidates: Tensor, k: int) -> Tensor:
    """Select the ``k`` pairs with the highest values from ``[b, n, 2]``, in order; the first ones of equal values."""
    values = candidates[..., 0]
    if k >= values.size(1):
        return candidates
    threshold = values.topk(k, dim=1).values[:, -1:]
    above = values > threshold
    equal = values == threshold
    kept = above | (equal & (equal.cumsum(1) <= k - above.sum(1, keepdim=True)))
    # Not candidates[kept], whose size requires a synchronization. Dropped candidates go to one extra slot.
    place = torch.where(kept, kept.cumsum(1) - 1, k).unsqueeze(-1).expand_as(candidates)
    result = candidates.new_empty(candidates.size(0), k + 1, 2)
    return result.scatter_(1, place, candidates)[:, :k]


def _likeliest(
    logits: Tensor, start: int, sampling: Sampling, vocab_size: int, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Return candidates that include those of top-p, and their ids, both ``[b, n]``; the others are -inf."""
    most, count = balanced_sizes(vocab_size, group.size())[0], _FIRST_CANDIDATES
    if count < most:
        highest = logits.amax(dim=1, keepdim=True)
        sums = ((logits - highest) / sampling.temperature).exp().sum(dim=1, keepdim=True)
        highest, sums = all_gather(torch.stack((highest, sums), dim=-1), group=group, dim=1).unbind(-1)
        best = highest.amax(dim=1, keepdim=True)
        total = (sums * ((highest - best) / sampling.temperature).exp()).sum(dim=1, keepdim=True)
        while count < most:
            values, ids = _gather_candidates(logits, start, count, vocab_size, group)
            reached = (((values - best) / sampling.temperature).exp() / total).sum(dim=1)
            # A sum that is no number is not less either.
            if not bool((reached < sampling.top_p).any()):
                return _keep_top_p(values, sampling, total), ids
            count *= _GROWTH
    values, ids = _gather_candidates(logits, start, vocab_size, vocab_size, group)
    return _keep_top_p(values, sampling), ids


def _keep_top_p(values: Tensor, sampling: Sampling, total: Tensor | None = None) -> Tensor:
    """Set ``values`` ``[b, n]`` to -inf except for the fewest whose probabilities sum to at least ``top_p``.

    ``total`` ``[b, 1]`` is the sum of all probabilities divided by the highest one; if None, that of ``values``.
    """
    ordered, order = values.sort(dim=1, descending=True, stable=True)
    scaled = (ordered - ordered[:, :1]) / sampling.temperature
    probabilities = scaled.softmax(dim=1) if total is None else scaled.exp() / total
    dropped = probabilities.cumsum(1) - probabilities >= sampling.top_p
    return values.masked_fill(torch.zeros_like(dropped).scatter_(1, order, dropped), -torch.inf)


def likeliest_ids(logits: Tensor, count: int, *, vocab_size: int, group: ProcessGroup) -> Tensor:
    """Return the ids of the ``count`` highest logits of each row, ``[b, count]``, the highest first.

    Of equal logits, the lowest ids are first. For the other arguments see ``sample_next_token``.
    """
    start = _check_shard(logits, vocab_size, group)
    values, ids = _gather_candidates(_without_nan(logits), start, count, vocab_size, group)
    return ids.gather(1, values.argsort(dim=1, descending=True, stable=True)).long()
