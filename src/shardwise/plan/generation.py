"""The plan of text generation: weights, key-value cache and peaks of a rank, and the largest batch that fits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from os import PathLike
from pathlib import Path
from typing import Annotated, Literal

import torch

from shardwise.core.errors import ConfigError
from shardwise.core.topology import Groups
from shardwise.models.adapters.config import LoraConfig
from shardwise.models.config import ModelConfig
from shardwise.models.description import build_model, model_config
from shardwise.models.generation import PreallocatedCache, Sampling, on_layers
from shardwise.models.generation.engine import CHUNK_SIZE, PAGE_SIZE
from shardwise.models.generation.generation import evaluation_mode, next_tokens, own_part
from shardwise.models.generation.paged_cache import Chunk, PagedCache, RaggedPass
from shardwise.models.generation.sampling import choose_next_token
from shardwise.models.gpt import GPT
from shardwise.models.transformer.block import only_layers
from shardwise.nn.replicated import named_param_layouts
from shardwise.plan.fake_rank import pretended
from shardwise.plan.machine import beyond_tensors, room_for_tensors
from shardwise.plan.rehearsal import kinds_of_layers
from shardwise.plan.timeline import PhaseLabel, Segment, Timeline
from shardwise.plan.workload import Mesh
from shardwise.run.commands.opened_model import check_fits
from shardwise.run.quantities import read_bytes, shown_bytes
from shardwise.storage.adapters import adapters_vocab_size, add_lora_, read_adapter_config
from shardwise.storage.huggingface.architectures import ARCHITECTURES
from shardwise.storage.huggingface.generation_config import USUAL_MAX_NEW_TOKENS
from shardwise.storage.huggingface.pretrained import read_config
from shardwise.training.bounds import (
    BATCH,
    DEFAULT_SEQUENCE,
    LOCAL_RANKS,
    NEW_TOKENS,
    SEQUENCE,
    check_value,
    checks_arguments,
)

Layers = Literal["auto", "training", "inference", "fused"]


@checks_arguments
def plan_generation(
    model_dir: str | PathLike[str],
    *,
    ranks: Annotated[int, LOCAL_RANKS] = 1,
    rank: int | None = None,
    batch_size: Annotated[int, BATCH] = 1,
    prompt_length: Annotated[int | None, SEQUENCE] = None,
    max_new_tokens: Annotated[int | None, NEW_TOKENS] = None,
    adapter: str | PathLike[str] | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    layers: Layers = "auto",
) -> GenerationPlan:
    """Plan the memory of a rank that generates text with a model that all ranks split.

    Args:
        model_dir: Hugging Face folder with the config.json of the model.
        ranks: number of ranks.
        rank: the rank to plan; if None, the one that needs the most.
        batch_size: number of texts that are generated together.
        prompt_length: number of tokens of each prompt; if None, 512, or what the model leaves.
        max_new_tokens: number of tokens to add to each; if None, 200, or what the model leaves.
        adapter: folder of adapters with an adapter_config.json, or None.
        device: device of the ranks.
        layers: layers of training, of inference or fused ones, as for ``generate``.

    Returns:
        The plan; ``generation_as_table`` in ``shardwise.plan.report`` formats it.

    Raises:
        ConfigError: the model is not causal, has experts or cannot be split so; the text is too long; there is no such
            rank.
        CheckpointError: there is no ``config.json``, or it cannot be read.
    """
    text = _text_of(model_dir, prompt_length, max_new_tokens, adapter, device, layers)
    return _planned(replace(text, batch_size=batch_size), ranks, rank)


@checks_arguments
def fit_generation(
    memory: str,
    model_dir: str | PathLike[str],
    *,
    ranks: int | Sequence[int] = 1,
    prompt_length: Annotated[int | None, SEQUENCE] = None,
    max_new_tokens: Annotated[int | None, NEW_TOKENS] = None,
    adapter: str | PathLike[str] | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    layers: Layers = "auto",
) -> list[GenerationPlan]:
    """Return the plans of the largest batches that fit into memory, the largest first.

    Args:
        memory: memory of a rank, such as "80GiB" or "16GB".
        ranks: number of ranks, or several numbers to choose from.
        model_dir, prompt_length, max_new_tokens, adapter, device, layers: see ``plan_generation``.

    Raises:
        ConfigError: no batch fits; or as for ``plan_generation``.
        CheckpointError: see ``plan_generation``.
    """
    text = _text_of(model_dir, prompt_length, max_new_tokens, adapter, device, layers)
    limit, found = read_bytes(memory), []
    numbers = (ranks,) if isinstance(ranks, int) else tuple(ranks)
    for number in numbers:
        check_value("ranks", number, int, LOCAL_RANKS)
        if (plan := _largest(text, number, room_for_tensors(limit, text.device_type))) is not None:
            found.append(plan)
    if not found:
        raise ConfigError(
            f"no text of {text.capacity:,} tokens fits into {shown_bytes(limit)} of each of "
            f"{', '.join(map(str, numbers))} ranks; use more ranks, a shorter prompt or fewer new tokens"
        )
    return sorted(found, key=lambda plan: (-plan.text.batch_size, plan.ranks))


@dataclass(frozen=True)
class Text:
    """Texts to generate, and the model.

    ``adapters`` are a configuration, and the ``model_type`` whose names of layers it has.
    """

    model: ModelConfig
    dtype: torch.dtype
    adapters: tuple[LoraConfig, str] | None
    device_type: str
    layers: Layers
    prompt_length: int
    max_new_tokens: int
    batch_size: int = 1

    @property
    def capacity(self) -> int:
        """Tokens of a text."""
        return self.prompt_length + self.max_new_tokens

    def build(self, groups: Groups) -> tuple[GPT, str]:
        """Build this rank's part of the model without values, and describe its layers."""
        config = model_config(self.model, params_dtype=self.dtype, perform_initialization=False)
        model = build_model(config, groups=Groups(tp=groups.tp), device=torch.device("cpu"))
        assert isinstance(model, GPT)
        if self.adapters is not None:
            add_lora_(model, self.adapters[0], ARCHITECTURES[self.adapters[1]])
        return on_layers(model, self.layers)

    def generate(self, model: GPT, timeline: Timeline) -> tuple[Segment, Segment]:
        """Read the prompts and, as if all but one token were there, add the last one."""
        place = len(timeline.segments)
        with evaluation_mode(model):
            for name, is_prompt in (("reading of the prompt", True), ("last token", False)):
                timeline.mark(PhaseLabel(name))
                if self.batch_size == 1:
                    self._continue_one(model, is_prompt=is_prompt)
                else:
                    self._continue_batch(model, is_prompt=is_prompt)
                timeline.mark(None)
        prompt, token = timeline.segments[place:]
        return prompt, token

    def cache(self, model: GPT) -> PreallocatedCache | PagedCache:
        """Create the cache of all texts."""
        if self.batch_size == 1:
            return PreallocatedCache.for_model(model, batch_size=1, capacity=self.capacity)
        pages = -(-(self.capacity - 1) // PAGE_SIZE) * self.batch_size
        return PagedCache.for_model(model, num_pages=pages, page_size=PAGE_SIZE)

    def _continue_one(self, model: GPT, *, is_prompt: bool) -> None:
        cache = self.cache(model)
        assert isinstance(cache, PreallocatedCache)
        cache.extend(0 if is_prompt else self.capacity - 1)
        unread = torch.zeros(1, self.prompt_length if is_prompt else 1, dtype=torch.int64)
        next_tokens(model, unread, cache, _SAMPLING, [torch.Generator()])

    def _continue_batch(self, model: GPT, *, is_prompt: bool) -> None:
        """Make the largest pass that reads prompts, while the texts before them grow, or the last one."""
        cache, left, chunks = self.cache(model), CHUNK_SIZE if is_prompt else 0, []
        assert isinstance(cache, PagedCache)
        for _ in range(self.batch_size):
            count, stop = (min(left, self.prompt_length), self.prompt_length) if left else (1, self.prompt_length + 1)
            if not is_prompt:
                stop = self.capacity - 1
            left = max(0, left - count)
            pages: list[int] = []
            cache.extend_(pages, stop)
            chunks.append(Chunk([0] * count, stop - count, pages, stop))
        chunks.reverse()
        rows = [row - 1 for row in accumulate(len(chunk.ids) for chunk in chunks)]
        row = RaggedPass(cache, chunks, rows)
        logits = own_part(model, model(row.ids, row.positions, cache=row)[:, 0])
        # One that draws for all texts needs as much memory as one for each.
        choose_next_token(
            logits, _SAMPLING, vocab_size=self.model.vocab_size, group=model.tp_group, generator=[torch.Generator()]
        )


_SAMPLING = Sampling(temperature=0.8, top_k=50)


@dataclass(frozen=True)
class GenerationPlan:
    """The needs of one rank that generates text: bytes of parameters and buffers, and of the key-value cache.

    ``num_parameters`` are those of the whole model, tied weights counted once. Peaks of ``prompt`` (the prompts are
    read) and ``token`` (the last one is computed) are bytes besides weights and cache.
    """

    text: Text
    ranks: int
    rank: int
    num_parameters: int
    layers: str
    weights: int
    cache: int
    prompt: Segment
    token: Segment

    @property
    def cache_per_token(self) -> float:
        """Bytes of the cache for a token of one text."""
        return self.cache / (self.text.batch_size * self.text.capacity)

    @property
    def total(self) -> int:
        """The most bytes at one time."""
        return self.weights + self.cache + max(self.prompt.peak, self.token.peak)

    @property
    def beyond(self) -> int:
        """Bytes of a GPU besides tensors; 0 on a CPU."""
        return beyond_tensors(self.total, self.text.device_type)

    @property
    def peak_at(self) -> str:
        """The part in which the most bytes are held."""
        return max((self.prompt, self.token), key=lambda part: part.peak).place.action


class _Rank:
    """Rehearses one rank with batches of any size."""

    def __init__(self, text: Text, ranks: int, rank: int) -> None:
        self.text, self.ranks, self.rank = text, ranks, rank
        with pretended(text.device_type, Mesh(tp=ranks), rank) as (groups, _):
            model, self.layers = text.build(groups)
            # A view of layers for inference has the parameters of the layers that it is of.
            storages = {
                tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
                for tensor in (*model.parameters(), *model.buffers())
            }
            self.weights = sum(storages.values())
            params = {param: layout for _, param, layout in named_param_layouts(model, ranks)}
            self.num_parameters = sum(math.prod(layout.global_shape) for layout in params.values())
            kinds = kinds_of_layers(model)
        # Nothing is kept for a backward, so a later layer of each kind has the peak of all.
        self._few = {index for index, kind in enumerate(kinds) if kinds[:index].count(kind) < 2}

    def plan(self, batch_size: int) -> GenerationPlan:
        """Plan a batch."""
        text = replace(self.text, batch_size=batch_size)
        with pretended(text.device_type, Mesh(tp=self.ranks), self.rank) as (groups, timeline), only_layers(self._few):
            model, _ = text.build(groups)
            cache = text.cache(model).num_bytes
            parts = [replace(part, peak=part.peak - cache) for part in text.generate(model, timeline)]
        return GenerationPlan(
            text, self.ranks, self.rank, self.num_parameters, self.layers, self.weights, cache, parts[0], parts[1]
        )


def _different(text: Text, ranks: int) -> list[int]:
    """Ranks with different shares of the weights, the first of each."""
    found: dict[tuple[torch.Size, ...], int] = {}
    for rank in range(ranks):
        with pretended(text.device_type, Mesh(tp=ranks), rank) as (groups, _), only_layers((0,)):
            model, _ = text.build(groups)
            found.setdefault(tuple(param.shape for param in model.parameters()), rank)
    return list(found.values())


def _planned(text: Text, ranks: int, rank: int | None) -> GenerationPlan:
    _check(text, ranks)
    if rank is not None and not 0 <= rank < ranks:
        raise ConfigError(f"rank {rank} is not one of the {ranks} ranks, 0 to {ranks - 1}")
    wanted = _different(text, ranks) if rank is None else [rank]
    plans = [_Rank(text, ranks, number).plan(text.batch_size) for number in wanted]
    return max(plans, key=lambda plan: plan.total)


def _largest(text: Text, ranks: int, limit: int) -> GenerationPlan | None:
    """The plan of the largest batch that needs at most ``limit`` bytes of each rank; None if not even one text does."""
    try:
        _check(text, ranks)
    except ConfigError:
        return None
    rehearsed = [_Rank(text, ranks, number) for number in _different(text, ranks)]

    def worst(batch_size: int) -> GenerationPlan:
        return max((rank.plan(batch_size) for rank in rehearsed), key=lambda plan: plan.total)

    best = worst(1)
    if best.total > limit:
        return None
    # The cache alone bounds the batch, whose bytes grow about evenly.
    low, high = 1, min(int(BATCH.high), (limit - best.weights) // best.cache)
    growth = float(best.total - best.weights)
    while low < high:
        middle = min(high, low + max(1, int((limit - best.total) / growth)))
        plan = worst(middle)
        growth = max(best.cache / low, (plan.total - best.total) / (middle - low))
        low, high, best = (middle, high, plan) if plan.total <= limit else (low, middle - 1, best)
    return best


def _check(text: Text, ranks: int) -> None:
    check_fits(text.model, ranks)
    if text.model.vocab_size < ranks:
        raise ConfigError(f"the {text.model.vocab_size} ids of the vocabulary cannot be split over {ranks} ranks")


def _text_of(
    model_dir: str | PathLike[str],
    prompt_length: int | None,
    max_new_tokens: int | None,
    adapter: str | PathLike[str] | None,
    device: str,
    layers: Layers,
) -> Text:
    """The text with the numbers that are not given."""
    path = Path(model_dir)
    config = read_config(path)
    model, longest = config.description, config.description.max_sequence_length
    if model.kind != "gpt":
        raise ConfigError(f"{path} is a {config.architecture.model_type} model, which adds no tokens")
    if model.transformers_config is not None:
        raise ConfigError(
            f"{path} is computed by transformers, whose caches are not planned; plan finetune plans its weights"
        )
    if prompt_length is None:
        prompt_length = max(
            1, min(DEFAULT_SEQUENCE, longest - (max_new_tokens or min(USUAL_MAX_NEW_TOKENS, longest // 2)))
        )
    if max_new_tokens is None:
        max_new_tokens = max(1, min(USUAL_MAX_NEW_TOKENS, longest - prompt_length))
    if prompt_length + max_new_tokens > longest:
        raise ConfigError(
            f"a prompt of {prompt_length} tokens and {max_new_tokens} new ones are more than {longest}, the longest "
            f"sequence of {path}"
        )
    adapters = None
    if adapter is not None:
        adapters = read_adapter_config(adapter), config.architecture.model_type
        model = dataclasses.replace(
            model, vocab_size=adapters_vocab_size(adapter, config.architecture, model.vocab_size)
        )
    on_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    return Text(
        model,
        config.dtype or torch.float32,
        adapters,
        "cuda" if on_cuda else "cpu",
        layers,
        prompt_length,
        max_new_tokens,
    )
