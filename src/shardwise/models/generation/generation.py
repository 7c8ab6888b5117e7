"""Autoregressive text generation for one prompt or a batch of prompts."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.communication.agreement import check_same
from shardwise.core.errors import ConfigError, VocabularyError
from shardwise.core.sharding import balanced_range
from shardwise.models.generation.cache import Cache, CausalModel, PreallocatedCache, PrefixCache, new_cache
from shardwise.models.generation.decoding import DecodeStep
from shardwise.models.generation.sampling import Sampling, checked_choice, choose_next_token
from shardwise.models.gpt import GPT
from shardwise.models.model_input import positions_of


def generate(
    model: CausalModel,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    eos_id: int | Sequence[int] | None = None,
    on_token: Callable[[int], None] | None = None,
    prefix: PrefixCache | None = None,
) -> list[int]:
    """Continue a prompt.

    Every rank of the model's tensor-parallel group calls it with the same arguments and gets the same tokens; the same
    seed gives the same tokens at every size of the group, up to rounding of the logits.

    The context has at most ``max_sequence_length`` tokens; a longer prompt loses its start. When the context is full,
    its older half is dropped and the rest is recomputed from position 0. Text of any length can therefore be generated,
    and each token depends on at least the previous ``max_sequence_length // 2`` tokens. With LongRoPE the context is
    also recomputed when it exceeds ``original_max_position_embeddings``, because the rotary frequencies of all of its
    tokens change.

    The model is in evaluation mode during the call. PyTorch's default random generators are not used.

    Args:
        model: the model; sequence parallelism is allowed, but saves nothing here and costs time.
        prompt_ids: token ids. If empty, the model starts from ``eos_id`` (the first, if there are several), as from the
            end of the text before.
        max_new_tokens: maximum number of tokens to generate.
        sampling: sampling parameters.
        seed: random seed, from 0 to 2**63 - 1.
        eos_id: id or ids of tokens that end the text.
        on_token: callback that receives each token as soon as it is chosen, on every rank. An exception from it ends
            the generation on its rank.
        prefix: cache of the previous text, of the same model; updated to this text.

    Returns:
        The new tokens, without the prompt and without the one that ended the text.

    Raises:
        ConfigError: the prompt is empty, ``max_new_tokens`` is negative, the seed is out of range, the model is one of
            several pipeline stages, or ``prefix`` belongs to another model.
        VocabularyError: a token of the prompt or ``eos_id`` is outside the vocabulary.
        DesyncError: the ranks have different arguments.
        DivergenceError: the logits are infinite or NaN.
    """
    vocab_size, eos_ids = _checked_model(model), _ids_of(eos_id)
    # Compare the ranks' arguments before the other checks, so that an error on one rank leaves no rank waiting.
    prompt_sha256 = hashlib.sha256(repr(list(prompt_ids)).encode()).hexdigest()
    window = model.max_sequence_length
    context = list(prompt_ids or eos_ids[:1])[-window:]
    is_of_another = prefix is not None and prefix.model is not model
    known = 0 if prefix is None or is_of_another else prefix.shared(context)
    kept = f", tokens kept: {known}{' of another model' if is_of_another else ''}" if prefix is not None else ""
    asked = f"prompt SHA-256 {prompt_sha256[:12]}, {max_new_tokens=}, {sampling}, {seed=}, {eos_ids=}{kept}"
    check_same(asked, "what to generate", group=model.tp_group)
    if is_of_another:
        raise ConfigError("the prefix cache is of another model; make it of the one that generates")
    _check_arguments(prompt_ids, max_new_tokens, seed, eos_ids, vocab_size)

    device = next(model.parameters()).device
    generator = torch.Generator(device=device if device.type == "cuda" else "cpu").manual_seed(seed)
    capacity = min(window, len(context) + max_new_tokens)
    if prefix is None:
        cache = new_cache(model, batch_size=1, capacity=capacity)
    else:
        cache = prefix.take(context, capacity)
    new_tokens: list[int] = []
    unread = torch.tensor([context[cache.length :]], device=device)
    step = None
    if isinstance(cache, PreallocatedCache) and isinstance(model, GPT) and DecodeStep.why_not(model) is None:
        step = DecodeStep(model, cache)
    try:
        with evaluation_mode(model):
            while len(new_tokens) < max_new_tokens:
                chosen = next_tokens(model, unread, cache, sampling, [generator], step=step)
                # The only synchronization with the device; the token itself returns to the model on the device.
                token = int(chosen)
                if token < 0:
                    checked_choice(chosen)
                if token in eos_ids:
                    break
                new_tokens.append(token)
                if on_token is not None:
                    on_token(token)
                context.append(token)
                unread = chosen.unsqueeze(0)
                is_full = len(context) > window
                if is_full:
                    context = context[-max(1, window // 2) :]
                if is_full or (model.rotary is not None and model.rotary.is_outgrown_at(len(context))):
                    cache.truncate(0)
                    unread = torch.tensor([context], device=device)
    finally:
        if prefix is not None:
            prefix.keep(context)
    return new_tokens


def generate_batch(
    model: CausalModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    eos_id: int | Sequence[int] | None = None,
) -> list[list[int]]:
    """Continue a batch of prompts of any lengths, each as ``generate`` does alone, up to rounding of the logits.

    Shorter prompts are padded on the left and masked. Prompts whose text would exceed ``max_sequence_length`` are
    generated one by one. So are all prompts if the rotary frequencies of the model depend on the text length.

    Args:
        model, max_new_tokens, sampling, eos_id: see ``generate``.
        prompts: token ids of each prompt.
        seed: random seed of each prompt.

    Returns:
        The new tokens of each prompt, in order.

    Raises:
        ConfigError, VocabularyError, DesyncError, DivergenceError: see ``generate``.
    """
    vocab_size, eos_ids = _checked_model(model), _ids_of(eos_id)
    sha256 = hashlib.sha256(repr([list(prompt) for prompt in prompts]).encode()).hexdigest()
    asked = f"prompts' SHA-256 {sha256[:12]}, {max_new_tokens=}, {sampling}, {seed=}, {eos_ids=}"
    check_same(asked, "what to generate", group=model.tp_group)
    for prompt in prompts:
        _check_arguments(prompt, max_new_tokens, seed, eos_ids, vocab_size)
    texts = {number: list(prompt or eos_ids[:1]) for number, prompt in enumerate(prompts)}
    together = [
        number
        for number, text in texts.items()
        if not model.depends_on_length and len(text) + max_new_tokens <= model.max_sequence_length
    ]
    found = _generate_together(model, [texts[number] for number in together], max_new_tokens, sampling, seed, eos_ids)
    results = dict(zip(together, found, strict=True))
    for number in texts.keys() - results.keys():
        results[number] = generate(
            model, texts[number], max_new_tokens=max_new_tokens, sampling=sampling, seed=seed, eos_id=eos_ids
        )
    return [results[number] for number in range(len(prompts))]


def _generate_together(
    model: CausalModel,
    texts: Sequence[list[int]],
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    eos_ids: Sequence[int],
) -> list[list[int]]:
    b, new_tokens = len(texts), [list[int]() for _ in texts]
    if b == 0 or max_new_tokens == 0:
        return new_tokens
    device = next(model.parameters()).device
    longest = max(map(len, texts))
    unread = torch.tensor([[0] * (longest - len(text)) + text for text in texts], device=device)
    mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts], device=device)
    kind = device if device.type == "cuda" else "cpu"
    generators = [torch.Generator(device=kind).manual_seed(seed) for _ in texts]
    cache = new_cache(model, batch_size=b, capacity=longest + max_new_tokens)
    going = set(range(b))
    with evaluation_mode(model):
        for _ in range(max_new_tokens):
            chosen = next_tokens(model, unread, cache, sampling, generators, mask=mask)
            for row, token in enumerate(checked_choice(chosen).tolist()):
                if row in going and token not in eos_ids:
                    new_tokens[row].append(token)
                else:
                    going.discard(row)
            if not going:
                break
            unread, mask = chosen.unsqueeze(1), torch.cat([mask, mask.new_ones(b, 1)], dim=1)
    return new_tokens


def next_tokens(
    model: CausalModel,
    unread: Tensor,
    cache: Cache,
    sampling: Sampling,
    generators: Sequence[torch.Generator],
    *,
    mask: Tensor | None = None,
    step: DecodeStep | None = None,
) -> Tensor:
    """Choose the token after each sequence, without synchronization; see ``choose_next_token``.

    Args:
        model: the model, in evaluation mode.
        unread: ``[b, s]``, tokens after those in the cache.
        cache: cache of the earlier tokens, to which these are appended.
        sampling: sampling parameters.
        generators: generator of each sequence.
        mask: ``[b, s]`` of the cache's tokens and ``unread``, 0 for padding; None for one sequence.
        step: pass of a single token, which replaces the model's if possible; or None.

    Returns:
        ``[b]`` ids.
    """
    if mask is None:
        logits = _next_logits(model, unread, cache, step)
    else:
        positions = positions_of(mask)[:, -unread.size(1) :].clamp(min=0)
        logits = _own_part(model, model.next_logits(unread, positions, mask, **_cached(cache)))
    vocab_size = _checked_model(model)
    return choose_next_token(logits, sampling, vocab_size=vocab_size, group=model.tp_group, generator=generators)


def sequence_log_probs(model: CausalModel, input_ids: Tensor) -> Tensor:
    """Return the log-probability of each token given the previous ones, from one forward pass over whole sequences.

    Args:
        model: the model; in evaluation mode during the call.
        input_ids: ``[b, s]``, at least 2 tokens each.

    Returns:
        ``[b, s - 1]``, for all tokens but the first; fp32 (fp64 for an fp64 model), the same on every rank.

    Raises:
        ShardingError: the sequences are longer than the model's ``max_sequence_length + 1``.
        VocabularyError: a token is outside the vocabulary.
    """
    with evaluation_mode(model):
        loss: Tensor = model(input_ids[:, :-1], labels=input_ids[:, 1:])
    return -loss


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Context of evaluation mode without gradients; restores each module's mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        # Not inference_mode: a buffer created under it cannot be used in training later.
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def _next_logits(model: CausalModel, unread: Tensor, cache: Cache, step: DecodeStep | None) -> Tensor:
    """Run the model on tokens ``[1, s]`` after those in the cache; return the logits ``[1, v/t]`` of the next token."""
    if step is not None and cache.length > 0 and unread.size(1) == 1:
        logits = step(unread.squeeze(0))
    else:
        positions = torch.arange(cache.length, cache.length + unread.size(1), device=unread.device)
        logits = model.next_logits(unread, positions, **_cached(cache))
    return _own_part(model, logits)


def _cached(cache: Cache) -> dict[str, Any]:
    # Each kind of model has its own kind of cache.
    return {"cache": cache}


def _own_part(model: CausalModel, logits: Tensor) -> Tensor:
    """Return this rank's part ``[b, v/t]`` of a model's logits."""
    if model.parallel_output:
        return logits
    start, stop = balanced_range(_checked_model(model), model.tp_group.size(), model.tp_group.rank())
    return logits[:, start:stop]


def _checked_model(model: CausalModel) -> int:
    """Return the size of the vocabulary; raise ConfigError for one of several pipeline stages."""
    if not (model.pre_process and model.post_process):
        raise ConfigError("generation needs the whole model on each rank, and this is one pipeline stage of it")
    assert model.vocab_size is not None
    return model.vocab_size


def _ids_of(eos_id: int | Sequence[int] | None) -> tuple[int, ...]:
    return () if eos_id is None else (eos_id,) if isinstance(eos_id, int) else tuple(eos_id)


def _check_arguments(
    prompt_ids: Sequence[int], max_new_tokens: int, seed: int, eos_ids: Sequence[int], vocab_size: int
) -> None:
    """Raise the errors of ``generate`` for arguments out of range."""
    if max_new_tokens < 0:
        raise ConfigError(f"max_new_tokens is {max_new_tokens}; it must not be negative")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed is {seed}; it must be from 0 to 2**63 - 1")
    if not prompt_ids and not eos_ids:
        raise ConfigError("the prompt is empty; give at least one token, or an eos_id to start from")
    for name, ids in (("prompt_ids[{}]", prompt_ids), ("eos_id", eos_ids)):
        for index, token in enumerate(ids):
            if not 0 <= token < vocab_size:
                raise VocabularyError(f"{name.format(index)} is {token}, outside the vocabulary of {vocab_size} ids")
