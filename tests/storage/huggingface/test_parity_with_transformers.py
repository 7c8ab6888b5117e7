"""Each architecture, loaded from transformers' folder at every layout: logits, loss and gradients are transformers'."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.parity import assert_close_to, gather_shards
from hf_references import BATCH, LENGTH, MODEL_PARAMS, WITH_EXPERTS, Reference, groups_of, layouts
from torch import Tensor

from shardwise.core.topology import Groups
from shardwise.megatron.schedules import get_forward_backward_func
from shardwise.models.generation import GREEDY, PreallocatedCache, Request, generate, generate_all
from shardwise.storage.huggingface import load_pretrained, read_config
from shardwise.storage.huggingface.mapping import compose
from shardwise.training.gradients.finalize import finalize_gradients_

# Of the norm. fp32, and transformers has its rotary angles in fp32 too.
RTOL = 2e-5


class Step:
    """One batch through a model of any number of stages, with what its last stage returned."""

    def __init__(self, model: Any, reference: Reference, groups: Groups, values: dict[str, Tensor]) -> None:
        self.model, self.reference, self.groups, self.values = model, reference, groups, values
        self.outputs: dict[str, Tensor] = {}

    def run(self, *, with_labels: bool) -> None:
        """Forward; with labels backward too."""

        def forward_step(iterator: object, model: Any) -> tuple[Tensor, Any]:
            labels = self.values["labels"] if with_labels else None
            output = self.call(model, labels)
            if model.post_process:
                output = self.remember(output, labels)
            return output, lambda scalar: (scalar, None)

        run = get_forward_backward_func(self.groups.pp.size(), None)
        run(
            forward_step_func=forward_step,
            data_iterator=None,
            model=self.model,
            num_microbatches=1,
            seq_length=LENGTH,
            micro_batch_size=len(self.values["input_ids"]),
            forward_only=not with_labels,
            pg_collection=self.groups,
        )

    def call(self, model: Any, labels: Tensor | None) -> Any:
        if self.reference.is_bert:
            return model(*(self.values[name] for name in ("input_ids", "mask", "token_types")), lm_labels=labels)
        return model(self.values["input_ids"], attention_mask=self.values.get("mask"), labels=labels)

    def remember(self, output: Any, labels: Tensor | None) -> Tensor:
        output, sentence_logits = output if self.reference.is_bert else (output, None)
        if sentence_logits is not None:
            self.outputs["sentence_logits"] = sentence_logits.detach()
        if labels is None:
            # [s, b, v], of which this rank has a part.
            self.outputs["logits"] = output.detach().transpose(0, 1).contiguous()
            return output
        loss = output.sum() / (labels != -100).sum()
        self.outputs["loss"] = loss.detach()
        return loss if sentence_logits is None else loss + sentence_logits.logsumexp(-1).sum()


def gathered_gradients(model: Any, reference: Reference) -> dict[str, Tensor]:
    """The gradients of this rank's stage, whole, by transformers' names."""
    config = read_config(reference.folder)
    table = config.architecture.table
    gradients: dict[str, Tensor] = {}
    for key, shard in model.sharded_state_dict().items():
        if not isinstance(shard.data, torch.nn.Parameter):
            continue
        grad = shard.data.grad
        assert grad is not None, f"{key} has no gradient"
        group = model.groups.experts if shard.replicas.is_of_expert else model.tp_group
        whole = gather_shards(grad, shard.layout, group)
        description = config.description
        composition = compose(table, key, shard.layout.global_shape, description)
        gradients |= composition.to_stored(whole)
    return gradients


def check(
    reference: Reference, expected: dict[str, Tensor], tp: int, pp: int, *, ep: int = 1, sequence_parallel: bool = False
) -> None:
    """Load the model at a layout, and compare logits, loss and gradients; at real tokens, where there is a mask."""
    groups = groups_of(tp, pp, ep)
    dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    model = load_pretrained(reference.folder, groups=groups, sequence_parallel=sequence_parallel, **dropout)
    model.parallel_output = False
    step = Step(model, reference, groups, expected)
    step.run(with_labels=False)
    step.run(with_labels=True)
    finalize_gradients_(
        model, tp_group=groups.tp, dp_group=groups.dp, embd_group=groups.embd, expert_dp_group=groups.expert_dp
    )
    assert bool(step.outputs) == model.post_process
    for name, value in step.outputs.items():
        wanted = expected[name]
        if name == "logits" and value.dim() == 3 and "mask" in expected and not reference.is_bert:
            assert value.isfinite().all()
            value, wanted = (each[expected["mask"] != 0] for each in (value, wanted))
        assert_close_to(value, wanted, rtol_of_norm=RTOL, name=f"{name} at tp {tp}, pp {pp}")
    gradients = gathered_gradients(model, reference)
    every = [None] * pp
    dist.all_gather_object(every, sorted(gradients), group=groups.pp)
    names = {f"gradient.{name}" for stage in every for name in stage}
    assert names == {name for name in expected if name.startswith("gradient.")}
    norm = math.sqrt(sum(float(expected[name].double().square().sum()) for name in names))
    for name, gradient in gradients.items():
        error = float((gradient - expected[f"gradient.{name}"]).norm())
        # Of the global norm: a key's bias, for one, has a gradient of zero in truth.
        assert error <= RTOL * norm, f"gradient of {name} at tp {tp}, pp {pp}: {error / norm:.2e} of {norm:.2e}"


@pytest.mark.sample(16)
@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("reference", MODEL_PARAMS, indirect=True)
def test_logits_loss_and_gradients(group: dist.ProcessGroup, reference: Reference) -> None:
    for tp, pp in layouts(group.size()):
        check(reference, reference.values(), tp, pp)
        if reference.name in WITH_EXPERTS and tp > 1:
            ep = next(each for each in (tp, tp // 2) if 6 % each == 0)
            check(reference, reference.values(), tp, pp, ep=ep, sequence_parallel=tp == 2)


@pytest.mark.sample(12)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("reference", MODEL_PARAMS, indirect=True)
def test_padded_batches(group: dist.ProcessGroup, padded: Reference) -> None:
    """With padding on the left, on the right and in the middle of rows."""
    for tp, pp in layouts(group.size()):
        check(padded, padded.padded_values(), tp, pp, sequence_parallel=group.size() == 2 and pp == 1)


@pytest.mark.sample(6)
@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "reference",
    [
        "qwen2_windows",
        "smollm3",
        "olmo2",
        "olmo3",
        "ministral3",
        "gemma2",
        "gemma3",
        "gemma4",
        "opt",
        "deepseek_v2",
        "deepseek_v3",
        "gpt_oss",
    ],
    indirect=True,
)
def test_logits_with_a_cache(group: dist.ProcessGroup, reference: Reference) -> None:
    """Five tokens, one, and the rest: each layer sees what its own window and positions let it see."""
    expected = reference.values()
    model = load_pretrained(reference.folder, groups=groups_of(2, 1), hidden_dropout=0.0, attention_dropout=0.0)
    model.parallel_output = False
    cache = PreallocatedCache.for_model(model, batch_size=BATCH, capacity=LENGTH)
    pieces = []
    with torch.no_grad():
        for start, stop in ((0, 5), (5, 6), (6, LENGTH)):
            ids = expected["input_ids"][:, start:stop]
            pieces.append(model(ids, torch.arange(start, stop), cache=cache))
    logits = torch.cat(pieces).transpose(0, 1)
    assert_close_to(logits, expected["logits"], rtol_of_norm=RTOL, name="logits")


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("reference", [each for each in MODEL_PARAMS if "bert" not in str(each)], indirect=True)
def test_greedy_texts(group: dist.ProcessGroup, reference: Reference) -> None:
    """Alone and in a batch of several lengths that is read in chunks, in a cache that is too small for all at once."""
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(reference.folder, experts_implementation="eager")
    split = group.size() % 2 == 0
    model = load_pretrained(reference.folder, groups=groups_of(group.size(), 1), sequence_parallel=split)
    rows = reference.values()["input_ids"].tolist()
    prompts = [rows[0][:4], rows[1][:7], rows[1][:1], rows[0][:6], rows[0][:2]]
    longest = min(20, model.max_sequence_length - 7)
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": longest}
    expected = [theirs.generate(torch.tensor([each]), **options)[0, len(each) :].tolist() for each in prompts]
    assert [generate(model, each, max_new_tokens=longest, sampling=GREEDY) for each in prompts] == expected
    requests = [Request(each, longest, GREEDY) for each in prompts]
    for capacity, chunk_size in ((None, 512), (64, 3)):
        together = generate_all(model, requests, capacity=capacity, chunk_size=chunk_size)
        assert [each.token_ids for each in together] == expected
