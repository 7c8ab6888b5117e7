"""Small GPTs as pipeline stages, and whole ones to hold them against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.core.topology import Topology
from shardwise.megatron.config import TransformerConfig
from shardwise.megatron.models.gpt import GPTModel
from shardwise.megatron.process_groups_config import ProcessGroupCollection
from shardwise.megatron.schedules import hidden_shape
from shardwise.models.transformer.layer import TransformerLayerSpec
from shardwise.training.pipeline import Pipeline, Schedule

VOCAB = 83
LENGTH = 11
MICRO_BATCH_SIZE = 2

Batch = tuple[Sequence[Tensor], Sequence[Tensor]]
"""Tokens and labels, ``[b, s]`` for each micro-batch."""


@dataclass
class Staged:
    """This rank's chunks of a model, with its groups."""

    chunks: nn.ModuleList
    topology: Topology

    def run(self, schedule: Schedule, batch: Batch, **options: Any) -> list[Tensor]:
        """The loss is the mean over all tokens. Shapes travel if the micro-batches have different ones."""
        tokens, labels = batch
        config = self.chunks[0].config
        dtype, (b, s) = config.params_dtype, tokens[0].shape
        shape: tuple[int | None, ...] = hidden_shape(config, s, b, tp_group=self.topology.group("tp"))
        if len({ids.shape for ids in tokens}) > 1:
            shape = (None, None, config.hidden_size)
        pipeline: Pipeline[Tensor] = Pipeline(list(self.chunks), group=self.topology.group("pp"))
        return pipeline.run(
            schedule,
            lambda micro_batch, chunk: self.chunks[chunk](tokens[micro_batch], labels=labels[micro_batch]),
            lambda _, losses: (losses.sum() / num_tokens(tokens), losses.detach()),
            shape=shape,
            dtype=dtype,
            device=torch.device("cpu"),
            **options,
        )

    def parameters_by_key(self) -> dict[str, Any]:
        return {key: shard for chunk in self.chunks for key, shard in chunk.sharded_state_dict().items()}


def staged_gpt(
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    num_chunks: int = 1,
    num_layers: int = 5,
    tied: bool = True,
    **options: Any,
) -> Staged:
    """The same weights at every layout."""
    topology = Topology.create(tp=tp, pp=pp, cp=cp)
    torch.manual_seed(7)
    state = torch.get_rng_state()
    config = TransformerConfig(
        num_layers=num_layers,
        hidden_size=24,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=33,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        virtual_pipeline_model_parallel_size=num_chunks if num_chunks > 1 else None,
        params_dtype=torch.float64,
        init_method_std=0.2,
        **{
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "activation_func": F.silu,
        }
        | options,
    )
    chunks = []
    for chunk in range(num_chunks):
        torch.set_rng_state(state)
        chunks.append(
            GPTModel(
                config,
                TransformerLayerSpec(),
                VOCAB,
                LENGTH,
                pre_process=topology.rank("pp") == 0 and chunk == 0,
                post_process=topology.rank("pp") == pp - 1 and chunk == num_chunks - 1,
                share_embeddings_and_output_weights=tied,
                position_embedding_type="learned_absolute",
                pg_collection=ProcessGroupCollection.from_topology(topology),
                vp_stage=chunk if num_chunks > 1 else None,
            )
        )
    return Staged(nn.ModuleList(chunks), topology)


def random_batch(num_micro_batches: int, *, seed: int = 3) -> tuple[Tensor, Tensor]:
    """``[m, b, s]`` tokens and labels, some of which cost nothing."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (num_micro_batches, MICRO_BATCH_SIZE, LENGTH), generator=generator)
    labels = torch.randint(VOCAB, (num_micro_batches, MICRO_BATCH_SIZE, LENGTH), generator=generator)
    labels[0, 0, :4] = -100
    return tokens, labels


def batch_of_sizes(sizes: Sequence[tuple[int, int]], *, seed: int = 3) -> Batch:
    """Micro-batches of different ``(b, s)``, some of whose labels cost nothing."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = ([torch.randint(VOCAB, size, generator=generator) for size in sizes] for _ in range(2))
    labels[0][0, :4] = -100
    return tokens, labels


def num_tokens(tokens: Sequence[Tensor]) -> int:
    return sum(ids.numel() for ids in tokens)


def run_whole(model: nn.Module, batch: Batch) -> list[Tensor]:
    """The unpipelined model, one micro-batch after the other."""
    tokens, labels = batch
    results = []
    for ids, targets in zip(tokens, labels, strict=True):
        losses = model(ids, labels=targets)
        (losses.sum() / num_tokens(tokens)).backward()
        results.append(losses.detach())
    return results
