"""Training steps of models with experts on two ranks: ours, a dense model of ours, and transformers' own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from ranks import join_ranks, leave_ranks, seconds_of

from shardwise.core.topology import Groups, Topology
from shardwise.data import Batch
from shardwise.kernels.host_memory import keep_freed_memory
from shardwise.models.description import build_model, model_config
from shardwise.models.experts.router import Router
from shardwise.run.settings import ModelSettings, Settings, TrainingSettings
from shardwise.storage.huggingface import load_pretrained, read_config
from shardwise.training.trainer import Trainer
from steps.baselines import by_mesh, clip_together_
from steps.problem import ADAM_EPSILON, BETAS, LEARNING_RATE, WEIGHT_DECAY

EXPERT_VARIANTS = ("balanced", "dense", "experts", "transformers", "transformers_tp")
"""On two data-parallel ranks: ours at ep 2, with as many tokens for each expert; a dense model of ours with the same
active work; ours at ep 2, with the tokens that the router chooses; that of transformers with ``ep_size=2`` and
``fsdp_size=2``. The last has ``tp_size=2`` instead: both ranks have the samples of both."""


@dataclasses.dataclass(frozen=True)
class ExpertSizes:
    """Sizes of a Qwen 3 with experts, and its batch on each rank."""

    hidden_size: int = 512
    num_layers: int = 4
    num_heads: int = 8
    num_experts: int = 8
    per_token: int = 2
    expert_ffn_hidden_size: int = 704
    vocab_size: int = 4096
    sequence_length: int = 512
    batch_size: int = 4

    def folder(self, path: str) -> None:
        """Save random weights as transformers does."""
        import transformers

        config = transformers.Qwen3MoeConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.per_token * self.expert_ffn_hidden_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_heads,
            head_dim=self.hidden_size // self.num_heads,
            max_position_embeddings=self.sequence_length,
            num_experts=self.num_experts,
            num_experts_per_tok=self.per_token,
            moe_intermediate_size=self.expert_ffn_hidden_size,
            norm_topk_prob=True,
        )
        torch.manual_seed(1)
        transformers.Qwen3MoeForCausalLM(config).save_pretrained(path)


class ExpertRunner:
    """One rank's models of all variants.

    Args:
        store: file through which the ranks connect.
        rank: rank of this process.
    """

    def __init__(self, store: str, rank: int) -> None:
        # As in a run.
        keep_freed_memory()
        self._rank = rank
        self._joined = join_ranks(store, rank, tp=1)
        self._topology: Topology | None = None
        self._steps: dict[str, Callable[[], tuple[float, float]]] = {}

    def prepare(self, sizes: ExpertSizes, folder: str) -> None:
        """Make the models."""
        self._topology = Topology.create(ep=2)
        groups = Groups.of(self._topology)
        generator = torch.Generator().manual_seed(2 + self._rank)
        ids = torch.randint(sizes.vocab_size, (sizes.batch_size, sizes.sequence_length + 1), generator=generator)
        experts = load_pretrained(folder, groups=groups)
        description = read_config(folder).description
        width = sizes.per_token * sizes.expert_ffn_hidden_size
        dense = dataclasses.replace(description, experts=None, ffn_hidden_size=width)
        torch.manual_seed(1)
        config = model_config(dense, hidden_dropout=0.0, attention_dropout=0.0)
        models = {"experts": experts, "dense": build_model(config, groups=groups)}
        self._steps = {name: self._ours(model, groups, sizes, ids) for name, model in models.items()}
        routers = [layer for layer in experts.modules() if isinstance(layer, Router)]

        def balanced() -> tuple[float, float]:
            for router in routers:
                router.experts = dataclasses.replace(router.experts, forces_balance=True)
            result = self._steps["experts"]()
            for router in routers:
                router.experts = dataclasses.replace(router.experts, forces_balance=False)
            return result

        self._steps["balanced"] = balanced
        self._steps["transformers"] = self._theirs(folder, ids, fsdp_size=2)
        every = [torch.empty_like(ids) for _ in range(2)]
        torch.distributed.all_gather(every, ids)
        self._steps["transformers_tp"] = self._theirs(folder, torch.cat(every), tp_size=2)

    def _ours(
        self, model: Any, groups: Groups, sizes: ExpertSizes, ids: torch.Tensor
    ) -> Callable[[], tuple[float, float]]:
        settings = Settings(
            data=("none",),
            model=ModelSettings(sequence_length=sizes.sequence_length),
            training=TrainingSettings(global_batch_size=2 * sizes.batch_size),
        )
        rates = {"learning_rate": LEARNING_RATE, "schedule": "constant", "warmup_steps": 0}
        settings = dataclasses.replace(settings, optimizer=dataclasses.replace(settings.optimizer, **rates))
        trainer = Trainer(settings, model, groups)
        batch = Batch(ids[:, :-1], ids[:, 1:])

        def step() -> tuple[float, float]:
            result = trainer.step(0, [batch])
            return result.loss, result.grad_norm

        return step

    def _theirs(self, folder: str, ids: torch.Tensor, **axes: int) -> Callable[[], tuple[float, float]]:
        import transformers
        from transformers.distributed import DistributedConfig

        model = transformers.Qwen3MoeForCausalLM.from_pretrained(
            folder, dtype=torch.float32, distributed_config=DistributedConfig(**axes, ep_size=2)
        ).train()
        options: dict[str, Any] = {"betas": BETAS, "eps": ADAM_EPSILON, "weight_decay": WEIGHT_DECAY}
        several = by_mesh(model.parameters())
        optimizer = torch.optim.AdamW(
            [{"params": params} for params in several], lr=LEARNING_RATE, fused=True, **options
        )

        def step() -> tuple[float, float]:
            optimizer.zero_grad()
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            norm = clip_together_(several)
            optimizer.step()
            return float(loss.detach()), float(norm)

        return step

    def first_step(self, variant: str) -> tuple[float, float]:
        """Make one step, and return its loss (of transformers this rank's, of ours the mean) and gradient norm."""
        return self._steps[variant]()

    def time_step(self, variant: str) -> float:
        """Return the seconds of a step."""
        return seconds_of(self._steps[variant], 1, together=True)

    def close(self) -> None:
        """Leave the process groups."""
        if self._topology is not None:
            self._topology.destroy()
        leave_ranks(self._joined)
