"""In exact mode the log-probabilities of generated tokens have the bits of one training forward of the whole text."""

from __future__ import annotations

import pytest
import torch
from harness.parity import assert_bit_equal
from models.test_exact import KINDS

from shardwise.core.errors import ConfigError
from shardwise.core.topology import Groups, Topology
from shardwise.models.config import ModelConfig
from shardwise.models.experts import Experts
from shardwise.models.generation import BatchEngine, PreallocatedCache, Request
from shardwise.models.generation.generation import evaluation_mode
from shardwise.models.gpt import GPT
from shardwise.models.transformer.rotary import RotaryScaling
from shardwise.nn.loss.cross_entropy import vocab_parallel_log_probs

# More than one block of keys, and a multiple of the parts.
VOCAB, LENGTH = 264, 528
# Chunks, single tokens, and the last and the first token of a block of keys.
STEPS = [37, 38, 201, 511, 512, 513, LENGTH]
PLAIN = {"num_layers": 2, "init_method_std": 0.3, "hidden_dropout": 0.0, "attention_dropout": 0.0}
CASES = {
    "llama": ("llama", {}),
    "llama, window": ("llama", {"window_size": (70, 0)}),
    "llama, caps": ("llama", {"qk_layernorm": True, "attention_logit_softcap": 2.0, "final_logit_softcap": 3.0}),
    "gpt": ("gpt", {}),
    "alibi": ("alibi", {}),
    "experts": ("llama", {"experts": Experts(num=8, per_token=2, ffn_hidden_size=24)}),
}


def made(case: str, topology: Topology, dtype: torch.dtype, **options: object) -> GPT:
    kind, more = CASES[case]
    fields, arguments = KINDS[kind]
    torch.manual_seed(1)
    config = ModelConfig(**(fields | PLAIN | more | options), params_dtype=dtype)
    return GPT(config, VOCAB, LENGTH, groups=Groups.of(topology), **arguments)


def texts(number: int) -> torch.Tensor:
    return torch.randint(VOCAB, (number, LENGTH + 1), generator=torch.Generator().manual_seed(3))


def trained(model: GPT, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities from the loss of a training forward."""
    return -model(ids[:, :-1], labels=ids[:, 1:]).detach()


def generated(model: GPT, ids: torch.Tensor, steps: list[int]) -> torch.Tensor:
    """Log-probabilities of all tokens of one text ``[1, s]``, which the model reads in chunks that end at ``steps``."""
    cache, start, found = PreallocatedCache.for_model(model, batch_size=1, capacity=LENGTH), 0, []
    with evaluation_mode(model):
        for stop in steps:
            logits = model(ids[:, start:stop], torch.arange(start, stop), cache=cache)
            labels = ids[:, start + 1 : stop + 1].t()
            found.append(vocab_parallel_log_probs(logits, labels, group=model.tp_group, vocab_size=VOCAB))
            start = stop
    return torch.cat(found).t()


def packed(model: GPT, ids: torch.Tensor) -> list[torch.Tensor]:
    """Log-probabilities from the loss of a row that packs the beginnings of texts ``[n, s]``."""
    lengths = [100, 13, LENGTH - 113]
    places = torch.cat([torch.arange(length) for length in lengths])
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    tokens, labels = (
        torch.cat([text[start : start + length] for text, length in zip(ids, lengths, strict=True)]) for start in (0, 1)
    )
    loss = model(tokens[None], places[None], labels=labels[None], document_ids=documents[None])
    return list((-loss.detach()).split(lengths, dim=1))


CASES_AND_DTYPES = [
    *((case, torch.float32) for case in CASES),
    *((case, torch.bfloat16) for case in ("llama", "llama, caps", "gpt", "experts")),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("case", "dtype"), CASES_AND_DTYPES)
def test_generation_has_the_bits_of_training(group, case, dtype):
    alone, split = Topology.create(tp=1, etp=1), Topology.create(tp=2, etp=1)
    ids = texts(3)
    model = made(case, split, dtype, exact_parts=8, sequence_parallel=True)
    expected = trained(model, ids)
    assert_bit_equal(trained(model, ids[1:2]), expected[1:2], name="another micro-batch")
    for row, found in enumerate(packed(model, ids)):
        assert_bit_equal(found, expected[row : row + 1, : found.size(1)], name="a packed row")
    for topology, steps in ((alone, STEPS), (split, STEPS[2:])):
        found = generated(made(case, topology, dtype, exact_parts=8), ids[:1], steps)
        assert_bit_equal(found, expected[:1], name="generation")
    if case == "llama":
        # A group has one kind of sum.
        other = Topology.create(tp=2)
        plain = made(case, other, dtype)
        assert not torch.equal(generated(plain, ids[:1], STEPS), trained(plain, ids)[:1]), "without exact bits differ"
        other.destroy()
    for topology in (alone, split):
        topology.destroy()


# Some of the texts are longer than the original context, others shorter.
LONG = RotaryScaling("longrope", 4.0, 200, short_factor=(1.0, 1.25), long_factor=(1.5, 9.0))
CASES["longrope"] = "llama", {"rope_scaling": LONG}


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("case", "dtype"), [("llama", torch.float32), ("llama", torch.bfloat16), ("longrope", torch.float32)]
)
def test_texts_that_join_and_leave(group, case, dtype):
    """Prompts of several lengths, in chunks and in two orders, have the bits of a training forward of each text.

    The last two share pages of another one.
    """
    alone, split = Topology.create(tp=1, etp=1), Topology.create(tp=2, etp=1)
    trainer = made(case, split, dtype, exact_parts=8, sequence_parallel=True)
    # The longest begins its second block of keys.
    prompts = [text[:length].tolist() for text, length in zip(texts(4), [1, 40, 509, 133], strict=True)]
    requests = [Request(prompt, 6, seed=3, log_probs=0, prompt_log_probs=0) for prompt in prompts]
    prompts += [prompts[2], [*prompts[2][:70], 5]]
    requests += [Request(prompt, 6, seed=4, log_probs=0) for prompt in prompts[4:]]
    for topology, order, limits in (
        (alone, [0, 1, 2, 3, 4, 5], {"max_sequences": 3, "chunk_size": 64}),
        (split, [2, 5, 4, 0, 3, 1], {"max_sequences": 2, "chunk_size": 500, "page_size": 7}),
    ):
        engine = BatchEngine(made(case, topology, dtype, exact_parts=8), **limits)
        for index, result in engine.run([requests[number] for number in order]):
            prompt = prompts[order[index]]
            text = torch.tensor([[*prompt, *result.token_ids]])
            whole = torch.nn.functional.pad(text, (0, -(text.size(1) - 1) % 8))
            found = torch.tensor([[each.value for each in (*result.prompt_log_probs, *result.log_probs)]])
            assert found.size(1) == (len(prompt) + 5 if order[index] < 4 else 6)
            expected = trained(trainer, whole)[:, : len(prompt) + 5]
            assert_bit_equal(found, expected[:, -found.size(1) :], name=f"prompt {order[index]}")
    for each in (alone, split):
        each.destroy()


@pytest.mark.ranks(1)
def test_texts_whose_rotary_frequencies_change_are_refused(group):
    """What is asked for must be measured by the frequencies of the whole text."""
    dynamic = RotaryScaling("dynamic", 4.0, original_max_position_embeddings=200)
    for scaling, right, wrong in (
        (LONG, [(199, 2), (190, 11), (201, 99), (200, 0), (202, 0)], [(199, 3), (200, 2), (201, 0)]),
        (dynamic, [(199, 2), (190, 11), (200, 0), (300, 1)], [(199, 3), (201, 0), (202, 0), (201, 2), (300, 2)]),
    ):
        engine = BatchEngine(made("llama", Topology.create(etp=1), torch.float32, exact_parts=2, rope_scaling=scaling))
        for length, new in right:
            engine.check(Request([1] * length, new))
        for length, new in wrong:
            with pytest.raises(
                ConfigError, match=r"over 200 tokens, and this one has \d+ when .* lower max_new_tokens"
            ):
                engine.check(Request([1] * length, new))


@pytest.mark.slow
@pytest.mark.ranks(8)
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("llama", torch.bfloat16),
        ("gpt", torch.float32),
        # On two ranks, ``test_generation_has_the_bits_of_training`` has all of them.
        pytest.param("llama", torch.float32, marks=pytest.mark.matrix),
        pytest.param("gpt", torch.bfloat16, marks=pytest.mark.matrix),
    ],
)
def test_every_number_of_ranks(group, case, dtype):
    topologies, ids, found = [Topology.create(tp=tp) for tp in (1, 2, 4, 8)], texts(2), []
    for topology in topologies:
        for sequence_parallel in (False, True):
            model = made(case, topology, dtype, exact_parts=8, sequence_parallel=sequence_parallel)
            found.append(trained(model, ids[: 1 + sequence_parallel])[:1])
        found.append(generated(made(case, topology, dtype, exact_parts=8), ids[:1], STEPS))
    for each in found[1:]:
        assert_bit_equal(each, found[0])
    for topology in topologies:
        topology.destroy()
