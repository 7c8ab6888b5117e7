"""Training steps of long samples, on one rank and on two that share each sample, and attention of a packed row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from ranks import join_ranks, leave_ranks, seconds_of
from torch import Tensor
from torch.nn.utils import get_total_norm

from shardwise.core.topology import Groups, Topology
from shardwise.data import Batch
from shardwise.kernels.host_memory import keep_freed_memory
from shardwise.models.config import ModelConfig
from shardwise.models.description import build_model, model_config
from shardwise.models.transformer.masks import AttentionMask
from shardwise.run.settings import ModelSettings, Settings, TrainingSettings
from shardwise.training.trainer import Trainer
from steps.problem import LEARNING_RATE

WAYS = ("all_gather", "a2a", "p2p")
"""How ranks that share a sample attend to all of it, values of ``ModelConfig.cp_comm_type``."""

PACKED_VARIANTS = ("packed", "dense mask")
"""Attention of a row of documents: ours, and PyTorch's with a mask of all pairs of positions."""


@dataclasses.dataclass(frozen=True)
class ContextSizes:
    """Sizes of a Llama, its batch of one sample, and a packed row of documents of equal length."""

    hidden_size: int = 512
    num_layers: int = 2
    num_heads: int = 8
    num_groups: int = 4
    vocab_size: int = 4096
    sequence_length: int = 8192
    packed_length: int = 8192
    num_documents: int = 16


class ContextRunner:
    """One rank's models: one for each way of two ranks, or the one of a single process.

    Args:
        store: file through which the ranks connect.
        rank: rank of this process.
        world: number of ranks.
    """

    def __init__(self, store: str, rank: int, world: int) -> None:
        # As in a run.
        keep_freed_memory()
        self._joined = join_ranks(store, rank, tp=1, world=world)
        self._topology = Topology.create(cp=world)
        self._groups = Groups.of(self._topology)
        self._steps: dict[str, Callable[[], tuple[float, float]]] = {}

    def prepare(self, sizes: ContextSizes) -> None:
        """Make the models."""
        description = ModelConfig(
            vocab_size=sizes.vocab_size,
            hidden_size=sizes.hidden_size,
            num_layers=sizes.num_layers,
            num_attention_heads=sizes.num_heads,
            num_query_groups=sizes.num_groups,
            kv_channels=sizes.hidden_size // sizes.num_heads,
            ffn_hidden_size=3 * sizes.hidden_size,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            position_embedding_type="rope",
            max_sequence_length=sizes.sequence_length,
        )
        ids = torch.randint(
            sizes.vocab_size, (1, sizes.sequence_length + 1), generator=torch.Generator().manual_seed(2)
        )
        batch = Batch(ids[:, :-1], ids[:, 1:])
        for way in WAYS if self._groups.cp is not None and self._groups.cp.size() > 1 else ("single",):
            torch.manual_seed(1)
            comm = {} if way == "single" else {"cp_comm_type": way}
            config = model_config(description, hidden_dropout=0.0, attention_dropout=0.0, **comm)
            model = build_model(config, groups=self._groups)
            self._steps[way] = self._step(model, sizes, batch)
        if "single" in self._steps:
            self._prepare_packed(sizes, model.decoder.layers[0].self_attention)

    def _step(self, model: Any, sizes: ContextSizes, batch: Batch) -> Callable[[], tuple[float, float]]:
        settings = Settings(
            data=("none",),
            model=ModelSettings(sequence_length=sizes.sequence_length),
            training=TrainingSettings(global_batch_size=1),
        )
        rates = {"learning_rate": LEARNING_RATE, "schedule": "constant", "warmup_steps": 0}
        settings = dataclasses.replace(settings, optimizer=dataclasses.replace(settings.optimizer, **rates))
        trainer = Trainer(settings, model, self._groups)

        def step() -> tuple[float, float]:
            result = trainer.step(0, [batch])
            return result.loss, result.grad_norm

        return step

    def _prepare_packed(self, sizes: ContextSizes, attention: Any) -> None:
        s, width = sizes.packed_length, sizes.hidden_size // sizes.num_heads
        numbers = (sizes.num_heads, sizes.num_groups, sizes.num_groups)
        tensors = [torch.randn(s, 1, number, width, requires_grad=True) for number in numbers]
        ids = (torch.arange(s) // -(-s // sizes.num_documents))[None]
        forbidden = (ids[:, :, None] != ids[:, None]) | torch.ones(s, s, dtype=torch.bool).triu(1)
        bias = torch.zeros(1, 1, s, s).masked_fill(forbidden[:, None], -torch.inf)

        def whole() -> Tensor:
            query, key, value = (each.permute(1, 2, 0, 3) for each in tensors)
            context = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, enable_gqa=True)
            return context.permute(2, 0, 1, 3).flatten(2)

        def in_blocks() -> Tensor:
            context: Tensor = attention.attended(*tensors, AttentionMask(document_ids=ids))
            return context

        def run(attend: Callable[[], Tensor]) -> tuple[float, float]:
            for each in tensors:
                each.grad = None
            output = attend()
            output.sum().backward()
            gradients = [each.grad for each in tensors if each.grad is not None]
            return float(output.detach().double().square().mean()), float(get_total_norm(gradients))

        self._steps |= {"packed": lambda: run(in_blocks), "dense mask": lambda: run(whole)}

    def first(self, variant: str) -> tuple[float, float]:
        """Run a step once: return its loss, or attention's mean square, and the norm of its gradients."""
        return self._steps[variant]()

    def time_step(self, variant: str) -> float:
        """Return the seconds of a step."""
        return seconds_of(self._steps[variant], 1, together=True)

    def close(self) -> None:
        """Leave the process groups."""
        self._topology.destroy()
        leave_ranks(self._joined)
