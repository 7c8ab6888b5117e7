"""Text from several prompts at once."""

import hashlib
from collections.abc import Sequence

import torch

from shardwise.core.communication.agreement import check_same
from shardwise.core.errors import ConfigError
from shardwise.core.sharding import balanced_range
from shardwise.models.generation.cache import PreallocatedCache
from shardwise.models.generation.generation import check_arguments, evaluation_mode, generate
from shardwise.models.generation.sampling import Sampling, checked_choice, choose_next_token
from shardwise.models.gpt import GPT
from shardwise.models.token_embedding import positions_of


def generate_batch(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    eos_id: int | Sequence[int] | None = None,
) -> list[list[int]]:
    """Continue prompts of any lengths at once: each as ``generate`` does alone, up to rounding of the logits.

    Shorter prompts are padded on the left, behind a mask. Those whose text would outgrow the model's
    ``max_sequence_length`` are generated one by one, and so are all of a model whose rotary frequencies depend on the
    length of its text: each text is rotated by its own length, whatever that of the others.

    Args:
        model, max_new_tokens, sampling, eos_id: see ``generate``.
        prompts: token ids of each.
        seed: of the choices of each.

    Returns:
        The new tokens of each prompt, in order.

    Raises:
        ConfigError, VocabularyError, DesyncError, DivergenceError: see ``generate``.
    """
    vocab_size = model.vocab_size
    assert vocab_size is not None
    if not (model.pre_process and model.post_process):
        raise ConfigError("generation needs the whole model on each rank, and this is one pipeline stage of it")
    eos_ids = () if eos_id is None else (eos_id,) if isinstance(eos_id, int) else tuple(eos_id)
    sha256 = hashlib.sha256(repr([list(prompt) for prompt in prompts]).encode()).hexdigest()
    asked = f"prompts' SHA-256 {sha256[:12]}, {max_new_tokens=}, {sampling}, {seed=}, {eos_ids=}"
    check_same(asked, "what to generate", group=model.tp_group)
    for prompt in prompts:
        check_arguments(prompt, max_new_tokens, seed, eos_ids, vocab_size)
    texts = {number: list(prompt or eos_ids[:1]) for number, prompt in enumerate(prompts)}
    together = [
        number
        for number, text in texts.items()
        if not model.depends_on_length and len(text) + max_new_tokens <= model.max_sequence_length
    ]
    found = _generate(
        model, [texts[number] for number in together], max_new_tokens, sampling, seed, eos_ids, vocab_size
    )
    results = dict(zip(together, found, strict=True))
    for number in texts.keys() - results.keys():
        results[number] = generate(
            model, texts[number], max_new_tokens=max_new_tokens, sampling=sampling, seed=seed, eos_id=eos_ids
        )
    return [results[number] for number in range(len(prompts))]


def _generate(
    model: GPT,
    texts: Sequence[list[int]],
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    eos_ids: Sequence[int],
    vocab_size: int,
) -> list[list[int]]:
    b, new_tokens = len(texts), [list[int]() for _ in texts]
    if b == 0 or max_new_tokens == 0:
        return new_tokens
    device, group = model.embedding.word_embeddings.weight.device, model.tp_group
    longest = max(map(len, texts))
    unread = torch.tensor([[0] * (longest - len(text)) + text for text in texts], device=device)
    mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts], device=device)
    kind = device if device.type == "cuda" else "cpu"
    generators = [torch.Generator(device=kind).manual_seed(seed) for _ in texts]
    cache = PreallocatedCache.for_model(model, batch_size=b, capacity=longest + max_new_tokens)
    going = set(range(b))
    with evaluation_mode(model):
        for _ in range(max_new_tokens):
            positions = positions_of(mask)[:, -unread.size(1) :].clamp(min=0)
            logits = model(unread, positions, mask, cache=cache)[-1]
            if not model.parallel_output:
                logits = logits[:, slice(*balanced_range(vocab_size, group.size(), group.rank()))]
            chosen = choose_next_token(logits, sampling, vocab_size=vocab_size, group=group, generator=generators)
            for row, token in enumerate(checked_choice(chosen).tolist()):
                if row in going and token not in eos_ids:
                    new_tokens[row].append(token)
                else:
                    going.discard(row)
            if not going:
                break
            unread, mask = chosen.unsqueeze(1), torch.cat([mask, mask.new_ones(b, 1)], dim=1)
    return new_tokens
