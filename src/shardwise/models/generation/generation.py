"""Autoregressive text generation for one prompt."""

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
from shardwise.models.generation.sampling import History, Sampling, checked_choice, choose_next_token
from shardwise.models.gpt import GPT


def generate(
    model: CausalModel,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    eos_id: int | Sequence[int] | None = None,
    on_token: Callable[[int], object] | None = None,
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
        on_token: callback that receives each token as soon as it is chosen, on every rank. A result that is true ends
            the text; an exception ends the generation on its rank.
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
    vocab_size, eos_ids = checked_model(model), ids_of(eos_id)
    # Compare the ranks' arguments before the other checks, so that an error on one rank leaves no rank waiting.
    prompt_sha256 = hashlib.sha256(repr(list(prompt_ids)).encode()).hexdigest()
    window = model.max_sequence_length
    prompt = list(prompt_ids or eos_ids[:1])
    context = prompt[-window:]
    is_of_another = prefix is not None and prefix.model is not model
    known = 0 if prefix is None or is_of_another else prefix.shared(context)
    kept = f", tokens kept: {known}{' of another model' if is_of_another else ''}" if prefix is not None else ""
    asked = f"prompt SHA-256 {prompt_sha256[:12]}, {max_new_tokens=}, {sampling}, {seed=}, {eos_ids=}{kept}"
    check_same(asked, "what to generate", group=model.tp_group)
    if is_of_another:
        raise ConfigError("the prefix cache is of another model; make it of the one that generates")
    check_arguments(prompt_ids, max_new_tokens, seed, eos_ids, vocab_size)

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
                histories = [History(prompt, new_tokens)] if sampling.has_penalties else []
                chosen = next_tokens(model, unread, cache, sampling, [generator], histories=histories, step=step)
                # The only synchronization with the device; the token itself returns to the model on the device.
                token = int(chosen)
                if token < 0:
                    checked_choice(chosen)
                if token in eos_ids:
                    break
                new_tokens.append(token)
                if on_token is not None and on_token(token):
                    break
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


def next_tokens(
    model: CausalModel,
    unread: Tensor,
    cache: Cache,
    sampling: Sampling,
    generators: Sequence[torch.Generator],
    *,
    histories: Sequence[History] = (),
    step: DecodeStep | None = None,
) -> Tensor:
    """Choose the token after each sequence; see ``choose_next_token``.

    Args:
        model: the model, in evaluation mode.
        unread: ``[b, s]``, tokens after those in the cache.
        cache: cache of the earlier tokens, to which these are appended.
        sampling: sampling parameters.
        generators: generator of each sequence.
        histories: earlier tokens of each sequence, for penalties.
        step: pass of a single token, which replaces the model's if possible; or None.

    Returns:
        ``[b]`` ids.
    """
    logits = _next_logits(model, unread, cache, step)
    options: dict[str, Any] = {"vocab_size": checked_model(model), "group": model.tp_group}
    return choose_next_token(logits, sampling, **options, generator=generators, histories=histories)


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
    return own_part(model, logits)


def _cached(cache: Cache) -> dict[str, Any]:
    # Each kind of model has its own kind of cache.
    return {"cache": cache}


def own_part(model: CausalModel, logits: Tensor) -> Tensor:
    """Return this rank's part ``[b, v/t]`` of a model's logits."""
    if model.parallel_output:
        return logits
    start, stop = balanced_range(checked_model(model), model.tp_group.size(), model.tp_group.rank())
    return logits[:, start:stop]


def checked_model(model: CausalModel) -> int:
    """Return the size of the vocabulary; raise ConfigError for one of several pipeline stages."""
    if not (model.pre_process and model.post_process):
        raise ConfigError("this is one pipeline stage of a model; only BatchEngine and generate_all generate in stages")
    assert model.vocab_size is not None
    return model.vocab_size


def ids_of(eos_id: int | Sequence[int] | None) -> tuple[int, ...]:
    return () if eos_id is None else (eos_id,) if isinstance(eos_id, int) else tuple(eos_id)


def check_arguments(
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
