"""Logits of models by plan: the loss of their parts equals that of whole logits; whatever else reads them gathers."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from harness.parity import assert_bit_equal
from models.by_plan.test_parallelize import SIZES, made
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from shardwise import Groups, parallelize
from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.errors import ConfigError, VocabularyError
from shardwise.core.sharded_state import gather_parameter
from shardwise.models.by_plan import library
from shardwise.models.by_plan.logits import SplitLogits
from shardwise.models.by_plan.model import PlannedModel
from shardwise.models.generation import (
    GREEDY,
    PrefixCache,
    Request,
    Sampling,
    generate,
    generate_all,
    sequence_log_probs,
)
from shardwise.models.recomputation import Recomputation
from shardwise.nn import named_param_layouts
from shardwise.training.gradients.finalize import finalize_gradients_

KINDS: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    # A soft cap on logits, and a factor.
    "Gemma2": {},
    # Its last rank has the row that is not learned, of an id that the texts begin with.
    "Cohere": {"pad_token_id": 27, "tie_word_embeddings": False},
}
# One collective, with three fp32 numbers of each token.
STATISTICS = [2 * 7 * 3 * 4]


def batches() -> list[tuple[Tensor, Tensor]]:
    """Two micro-batches with different numbers of labels."""
    ids = torch.randint(1, 37, (2, 2, 7), generator=torch.Generator().manual_seed(6))
    labels = ids.clone()
    labels[0, 0, 3:] = labels[1, :, 2:] = -100
    return list(zip(ids, labels, strict=True))


def gathered(counter: CollectiveCounter) -> list[int]:
    return [launch.num_bytes for launch in counter.launches if launch.name == "all_gather"]


def check_gradients(model: nn.Module, whole: nn.Module, group: ProcessGroup) -> None:
    finalize_gradients_(model, tp_group=group, dp_group=None)
    dense = {name: param.grad for name, param in whole.named_parameters()}
    for name, param, layout in named_param_layouts(model, group.size()):
        # transformers computes its loss in fp32.
        found = gather_parameter(param.grad, layout, group=group)
        torch.testing.assert_close(found, dense[name], rtol=2e-6, atol=2e-6, msg=lambda text, name=name: name + text)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_parts_equals_the_loss_of_whole_logits(group: ProcessGroup, kind: str) -> None:
    whole = made(kind, KINDS[kind])
    model = parallelize(copy.deepcopy(whole), Groups(tp=group))
    for ids, labels in batches():
        shifted = F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
        for options in ({}, {"num_items_in_batch": torch.tensor(11)}, {"shift_labels": shifted, "ignore_index": 5}):
            if "ignore_index" in options:
                shifted.masked_fill_(shifted == -100, 5)
            with CollectiveCounter() as counter:
                found, expected = (each(input_ids=ids, labels=labels, **options) for each in (model, whole))
            assert gathered(counter) == STATISTICS
            assert found.logits.is_split
            assert found.logits.requires_grad
            assert found.logits.shape == expected.logits.shape
            torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)
            found.loss.backward()
            expected.loss.backward()
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-6, atol=1e-6)
        assert not found.logits.is_split
    check_gradients(model, whole, group)
    with torch.no_grad():
        assert type(model(input_ids=ids).logits) is Tensor
    with pytest.raises(VocabularyError, match="37"):
        model(input_ids=ids, labels=labels + 37)


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def fewer(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[..., :30].flatten(0, 1), labels.flatten().clamp(max=29))


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 1.5, 37, dtype=logits.dtype)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=weight)


def of_classes_first(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels)


def scaled_by_a_tensor(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((logits * torch.linspace(0.5, 1, 37)).view(-1, 37), labels.flatten())


def written_through_a_view(logits: Tensor, labels: Tensor) -> Tensor:
    rows = logits.double().view(-1, 37)
    again = rows.view(14, 37)
    again[:, 3] = -9.0
    return F.cross_entropy(rows, labels.flatten())


def looked_at_first(logits: Tensor, labels: Tensor) -> Tensor:
    with torch.no_grad():
        assert logits.argmax(-1).shape == labels.shape
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def looked_at_apart_first(logits: Tensor, labels: Tensor) -> Tensor:
    # The same memory, which must not be gathered twice, nor be whole in one and split in the other.
    assert logits.detach().argmax(-1).shape == labels.shape
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def of_its_bits(logits: Tensor, labels: Tensor) -> Tensor:
    share = (logits.view(torch.int64) * 1).double().abs().mean() / 2**62
    return share * F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def of_another_function(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(_Identity.apply(logits).flatten(0, 1), labels.flatten())


def added_to_another(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.1 * logits.logsumexp(-1).square().mean()


READERS = (
    fewer,
    smoothed,
    weighted,
    of_classes_first,
    scaled_by_a_tensor,
    written_through_a_view,
    looked_at_first,
    looked_at_apart_first,
    of_its_bits,
    of_another_function,
    added_to_another,
)


class Planted(transformers.LlamaForCausalLM):
    """A model whose forward does something else with its logits."""

    def forward(self, input_ids: Tensor, labels: Tensor, read: Any) -> Any:  # type: ignore[override]
        logits = self.lm_head(self.model(input_ids=input_ids, use_cache=False).last_hidden_state) / 2.0
        return transformers.modeling_outputs.CausalLMOutput(loss=read(logits, labels), logits=logits)


@pytest.mark.ranks(2)
def test_a_forward_that_reads_logits_otherwise_has_whole_ones(group: ProcessGroup) -> None:
    whole = made("Llama", {})
    whole.__class__ = Planted
    model = parallelize(copy.deepcopy(whole), Groups(tp=group))
    for read in READERS:
        for ids, labels in batches():
            found, expected = (each(ids, labels, read) for each in (model, whole))
            assert type(found.logits) is SplitLogits
            assert not found.logits.is_split
            torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0, msg=read.__name__)
            torch.testing.assert_close(found.logits, expected.logits, rtol=1e-6, atol=1e-6)
            found.loss.backward()
            expected.loss.backward()
    check_gradients(model, whole, group)
    logits = model(ids, labels, lambda logits, labels: None).logits
    with pytest.raises(ConfigError, match=r"c10d.allreduce_.* may write into logits that are split over the ranks"):
        group.allreduce([logits])
    assert logits.is_split


def own_model(group: ProcessGroup, kind: str = "Arcee", /, **changes: Any) -> PlannedModel:
    """A model with the same values at each call; one of Mistral's has a window."""
    sizes = SIZES | ({"sliding_window": 4} if kind == "Mistral" else {})
    config = getattr(transformers, f"{kind}Config")(**sizes, architectures=[f"{kind}ForCausalLM"]).to_dict()
    model = PlannedModel(replace(library.describe(config), **changes), groups=Groups(tp=group))
    generator = torch.Generator().manual_seed(7 + group.rank())
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    return model


@pytest.mark.ranks(2)
def test_our_own_forward_never_gathers_for_a_loss(group: ProcessGroup) -> None:
    model = own_model(group)
    with torch.no_grad():
        ids, labels = batches()[0]
        with CollectiveCounter() as counter:
            losses = model(ids, labels=labels)
        assert gathered(counter) == STATISTICS
        logits = model(ids).transpose(0, 1)
    assert type(logits) is Tensor
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    torch.testing.assert_close(losses, expected)
    with torch.no_grad():
        assert own_model(group, params_dtype=torch.bfloat16)(ids, labels=labels).dtype == torch.float32


@pytest.mark.ranks(2)
def test_the_engine_for_batches_continues_each_prompt(group: ProcessGroup) -> None:
    """With caches of transformers, one prompt after the other; log-probabilities are those of a forward."""
    model = own_model(group).double()
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    alone = [
        generate(model, prompt, max_new_tokens=6, sampling=Sampling(1.3), seed=number)
        for number, prompt in enumerate(prompts)
    ]
    requests = [
        Request(prompt, 6, Sampling(1.3), seed=number, log_probs=0, prompt_log_probs=0, temperature=1.0)
        for number, prompt in enumerate(prompts)
    ]
    for prompt, expected, found in zip(prompts, alone, generate_all(model, requests), strict=True):
        assert found.token_ids == expected
        values = torch.tensor([each.value for each in (*found.prompt_log_probs, *found.log_probs)])
        ids = torch.tensor([[*prompt, *expected]])
        torch.testing.assert_close(values, sequence_log_probs(model, ids)[0].to(values.dtype), rtol=1e-5, atol=1e-5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["Arcee", "Mistral"])
def test_a_prompt_that_begins_as_the_last_text(group: ProcessGroup, kind: str) -> None:
    """What the cache can keep is not read again: with a window only all of it, since the rest is forgotten."""
    model, read = own_model(group, kind).double(), list[int]()
    model.whole.register_forward_pre_hook(
        lambda _, args, options: read.append(options["input_ids"].size(1)), with_kwargs=True
    )
    prefix = PrefixCache(model)
    text = [1, 2, 3, 4, 5]
    text += generate(model, text, max_new_tokens=3, sampling=GREEDY, prefix=prefix)
    # The last token of the text was not read.
    for prompt, kept in ([*text, 6], 7), ([1, 2, 3, 9, 9], 3 if kind == "Arcee" else 0), ([2, 3], 0):
        read.clear()
        found = generate(model, prompt, max_new_tokens=3, sampling=GREEDY, prefix=prefix)
        assert read == [len(prompt) - kept, 1, 1]
        assert found == generate(model, prompt, max_new_tokens=3, sampling=GREEDY)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    # The first layer has read the last token, and the second one has not.
    handle, prompt = model.layers[1].register_forward_pre_hook(interrupt), [2, 3, 1]
    with pytest.raises(KeyboardInterrupt):
        generate(model, prompt, max_new_tokens=3, sampling=GREEDY, prefix=prefix)
    handle.remove()
    read.clear()
    again = generate(model, prompt, max_new_tokens=3, sampling=GREEDY, prefix=prefix)
    assert read == [3, 1, 1]
    assert again == generate(model, prompt, max_new_tokens=3, sampling=GREEDY)


@pytest.mark.ranks(2)
def test_recomputation_repeats_the_forward_of_each_layer(group: ProcessGroup) -> None:
    ids, labels = batches()[0]
    plain, recomputing = own_model(group), own_model(group, recompute=Recomputation("full"))
    sums = []
    for model in (plain, recomputing):
        loss = model(ids, labels=labels).sum()
        with CollectiveCounter() as counter:
            loss.backward()
        sums.append(sum(launch.name == "all_reduce" for launch in counter.launches))
    # At least the one of attention, in each of two layers.
    assert sums[1] - sums[0] in (2, 4)
    for own, other in zip(plain.parameters(), recomputing.parameters(), strict=True):
        assert_bit_equal(own.grad, other.grad)


@pytest.mark.ranks(2)
def test_the_banner_says_how_the_loss_is_computed(group: ProcessGroup) -> None:
    model = own_model(group)
    assert model.described_loss == "the loss splits the vocabulary"
    model.whole.set_output_embeddings(nn.Linear(24, 37))
    assert model.described_loss == "the plan leaves the head whole"


def test_the_source_of_a_forward_says_what_reads_logits_otherwise() -> None:
    for kind in ("Llama", "Gemma2", "Beam", "Granite", "HyperCLOVAX", "NemotronH", "Qwen3Moe"):
        assert library.other_use_of_logits(getattr(transformers, f"{kind}ForCausalLM")) == "", kind
    found = library.other_use_of_logits(transformers.InklingForCausalLM)
    assert found == "logits[..., :unpadded_vocab_size]"
