"""Reinforcement learning on sums that arithmetic checks: GRPO with Shardwise's Python API.

    export OMP_NUM_THREADS=1
    torchrun --nproc-per-node 2 examples/grpo.py --exact          # a tiny model from nothing
    torchrun --nproc-per-node 2 examples/grpo.py MODEL_DIR --steps 5   # a Hugging Face folder

Both ranks sample together (tensor parallel, each with half of every layer) and train apart (data parallel, each with
the whole model on half of the samples). New weights go from one layout to the other in memory. The advantage of a
sample is its reward less the mean of its prompt's samples, by their standard deviation (Shao et al. 2024,
arXiv:2402.03300).

The importance ratio of a token is its probability in training by that in sampling. Each sample is trained on once, so
it should be 1. With ``--exact`` it is, in all bits; without, it is as far from 1 as two layouts round differently.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from shardwise import Groups, Topology
from shardwise.core.communication.collectives import all_reduce
from shardwise.data.tokenizer import PaddedTokenizer
from shardwise.models import GPT, ModelConfig
from shardwise.models.generation import BatchEngine, Generated, Request, Sampling
from shardwise.nn import named_param_layouts
from shardwise.storage.huggingface import load_pretrained
from shardwise.training.gradients.finalize import finalize_gradients_
from shardwise.training.optimizer.adamw import AdamW
from shardwise.training.optimizer.clipping import clip_grad_norm_

SYMBOLS = "0123456789+=."  # The tokens of the tiny model; its vocabulary is a multiple of the parts of exact mode.
VOCAB, PARTS, IGNORED, CLIP = 16, 2, -100, 0.2


class Task(NamedTuple):
    """Sums as tokens: their encoder and decoder, what stands before a sum, and the largest summand."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    prefix: str
    largest: int

    def prompts(self, number: int, seed: int) -> list[tuple[str, str]]:
        """Draw sums and their results."""
        drawn = random.Random(seed)
        pairs = [(drawn.randint(0, self.largest), drawn.randint(0, self.largest)) for _ in range(number)]
        return [(f"{self.prefix}{a}+{b}=", str(a + b)) for a, b in pairs]

    def reward(self, sample: Generated, result: str) -> float:
        """Return 1 if the text begins with the result and no further digit, else 0."""
        text = self.decode(sample.text_ids).strip()
        return float(text.startswith(result) and not text[len(result) : len(result) + 1].isdigit())


def tiny_model(groups: Groups, exact_parts: int | None) -> GPT:
    """Make a Llama of two layers; each rank makes its shards of the same weights."""
    config = ModelConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=64,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        exact_parts=exact_parts,
    )
    torch.manual_seed(1234)
    return GPT(config, VOCAB, 16, groups=groups, position_embedding_type="rope")


def hand_over_(trained: GPT, sampler: GPT) -> None:
    """Copy this rank's shards of the trained weights, which this rank has whole, to the model that samples."""
    whole = dict(trained.named_parameters())
    with torch.no_grad():
        for name, shard, layout in named_param_layouts(sampler, sampler.tp_group.size()):
            shard.copy_(layout.take(whole[name], sampler.tp_group.rank()))


def log_probs_of(model: GPT, prompts: Sequence[Sequence[int]], samples: Sequence[Generated]) -> Tensor:
    """Return the log-probability of each sampled token from one training forward, 0 for prompts and padding."""
    rows = [[*prompt, *sample.token_ids] for prompt, sample in zip(prompts, samples, strict=True)]
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    labels = tokens.clone()
    for row, prompt, sample in zip(labels, prompts, samples, strict=True):
        row[: len(prompt)] = row[len(prompt) + len(sample.token_ids) :] = IGNORED
    losses: Tensor = model(tokens[:, :-1], labels=labels[:, 1:].contiguous())
    return -losses


def sampled_log_probs(like: Tensor, prompts: Sequence[Sequence[int]], samples: Sequence[Generated]) -> Tensor:
    """Return the log-probabilities that sampling recorded, in the places of ``log_probs_of``."""
    found = torch.zeros_like(like)
    for row, prompt, sample in zip(found, prompts, samples, strict=True):
        start = len(prompt) - 1
        row[start : start + len(sample.token_ids)] = torch.tensor([each.value for each in sample.log_probs])
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", help="Hugging Face folder; a tiny model if not given")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8, help="texts for each prompt")
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--exact", action="store_true", help="the same bits at both layouts")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    # The same ranks in two layouts: all of them split a layer, or each has the whole model.
    together, apart = Topology.create(tp=world), Topology.create(tp=1)
    to_sample, to_train = Groups.of(together), Groups.of(apart)
    assert to_train.dp is not None
    parts = PARTS if options.exact else None
    if options.model is None:
        sampler, model = tiny_model(to_sample, parts), tiny_model(to_train, parts)
        task = Task(lambda text: [SYMBOLS.index(c) for c in text], lambda ids: "".join(map(_symbol, ids)), "", 3)
        rate, new_tokens = options.learning_rate or 1e-2, 1
    else:
        sampler, model = (
            load_pretrained(options.model, groups=groups, exact_parts=parts) for groups in (to_sample, to_train)
        )
        tokenizer = PaddedTokenizer.load(options.model)
        assert tokenizer is not None
        task = Task(tokenizer.encode, tokenizer.decode, "1+2=3\n2+2=4\n", 9)
        rate, new_tokens = options.learning_rate or 1e-6, 3
    optimizer = AdamW(model, learning_rate=rate, weight_decay=0.0, betas=(0.9, 0.95), epsilon=1e-8)

    for step in range(options.steps):
        hand_over_(model, sampler)
        sums = [each for each in task.prompts(options.prompts, step) for _ in range(options.samples)]
        prompts = [task.encode(text) for text, _ in sums]
        requests = [
            Request(prompt, new_tokens, Sampling(1.0), seed=step * len(sums) + number, log_probs=0)
            for number, prompt in enumerate(prompts)
        ]
        engine = BatchEngine(sampler, max_sequences=len(requests), capacity=64 * len(requests))
        found = dict(engine.run(requests))
        samples = [found[number] for number in range(len(requests))]
        rewards = torch.tensor([task.reward(each, result) for each, (_, result) in zip(samples, sums, strict=True)])
        groups = rewards.view(options.prompts, options.samples)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()

        # Each rank trains on its share of the samples.
        own = slice(to_train.dp.rank(), None, to_train.dp.size())
        new = log_probs_of(model, prompts[own], samples[own])
        ratio = (new - sampled_log_probs(new, prompts[own], samples[own])).exp()
        gain = advantages[own, None]
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        loss = -torch.minimum(ratio * gain, clipped * gain)[new != 0].sum() / len(samples)
        optimizer.zero_grad()
        loss.backward()
        finalize_gradients_(model, tp_group=to_train.tp, dp_group=to_train.dp)
        clip_grad_norm_(model, 1.0, tp_group=to_train.tp)
        optimizer.step()
        furthest = all_reduce((ratio.detach() - 1).abs().max(), group=to_train.dp, op=dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            print(f"step {step:3d}  reward {rewards.mean():.3f}  furthest ratio from 1: {furthest:.1e}", flush=True)
    apart.destroy()
    together.destroy()
    dist.destroy_process_group()


def _symbol(token: int) -> str:
    return SYMBOLS[token] if token < len(SYMBOLS) else "?"


if __name__ == "__main__":
    main()
