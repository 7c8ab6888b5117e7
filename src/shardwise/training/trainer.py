"""The trainer: a training step, and evaluation on held-out rows."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from shardwise.core.communication.agreement import agree
from shardwise.core.communication.context import numbers_without_sync
from shardwise.core.errors import ConfigError, DivergenceError
from shardwise.core.random import seed_streams
from shardwise.core.topology import Groups
from shardwise.core.validation import DeferredChecks
from shardwise.data import Batch, DataLoader, HeldOut
from shardwise.data.batch import BatchMover
from shardwise.models.description import ModelChunks
from shardwise.models.experts.moe import MoELayer
from shardwise.models.experts.router import METRICS, metrics_of
from shardwise.models.language_model import LanguageModel
from shardwise.models.transformer.core_attention import CoreAttention
from shardwise.models.transformer.layer import TransformerLayer
from shardwise.models.transformer.masks import AttentionMask
from shardwise.training.gradients import GradientBuffers, Total
from shardwise.training.gradients.finalize import finalize_gradients_
from shardwise.training.gradients.replicas import check_replicas
from shardwise.training.hooks import NO_HOOKS, StepHooks
from shardwise.training.objective import CrossEntropy, Objective, means_of, outputs_of
from shardwise.training.optimizer.choice import build_optimizer, fused_adamw
from shardwise.training.optimizer.clipping import scale_gradients_
from shardwise.training.optimizer.mixed_precision import PRECISIONS, DynamicLossScale
from shardwise.training.optimizer.optimizer import (
    ZeroOptimizer,
    set_learning_rate_,
)
from shardwise.training.pipeline import Pipeline, Schedule, forward_only, make_schedule
from shardwise.training.pipeline.schedules import Action, Kind
from shardwise.training.reduction import Numbers
from shardwise.training.step_settings import StepSettings

_BATCHES_PER_STAGE = 8

# A step, its data loader, and its micro-batches, whose copies to the device were started.
_Prepared = tuple[int, DataLoader, list[Batch]]


@dataclass(frozen=True)
class StepResult:
    """Result of one step.

    Attributes:
        loss: mean loss over the global batch before the update, in nats per token.
        others: means of the objective's other sums over the global batch.
        routing: metrics of experts by name; empty without experts.
        grad_norm: global gradient norm before clipping.
        learning_rate: learning rate of the update.
        loss_scale: factor of the loss; None if the loss was not scaled.
        is_skipped: whether the update was skipped because the gradient overflowed.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    loss_scale: float | None = None
    is_skipped: bool = False
    others: tuple[float, ...] = ()
    routing: dict[str, float] = field(default_factory=dict)


class _ReadNumbers(NamedTuple):
    losses: list[float]
    grad_norm: float
    rank_reports: list[float]
    routing: dict[str, float]


class Trainer:
    """Trains a model with an optimizer, on the model's process groups; reads and writes no files.

    Args:
        settings: settings of the run.
        model: the model, on its device; with pipeline stages, this rank's stage or its chunks.
        groups: process groups of the model; the trainer needs ``dp``, which may be a group of one rank.
        objective: the loss; None for the cross entropy of each token.

    Raises:
        ConfigError: ``groups`` has no data-parallel group, or ranks share samples (``cp``) and the objective cannot.
        DesyncError: ranks hold different values of a replicated parameter; raised on every rank.

    Attributes:
        sample_rank, num_sample_ranks: this rank's place among the ranks, or groups of ranks, with different samples,
            and their number.
        gradients: object that sums gradients over data-parallel ranks and micro-batches.
        zero: the optimizer if its state is split over the data-parallel ranks, otherwise None.
        loss_scale: dynamic scale of the loss; None if the loss is not scaled.
        num_skipped: number of steps skipped because of an overflow.
        defers_checks: whether ids out of range are reported when the loss and the norm are read, the only time that a
            step waits for the device, instead of where they are used. False on a CPU, where a check needs no wait.
    """

    def __init__(
        self,
        settings: StepSettings,
        model: LanguageModel | ModelChunks,
        groups: Groups,
        objective: Objective | None = None,
    ) -> None:
        self._model_groups = groups
        check_replicas(model, **_of_replicas(groups))
        self.settings = settings
        self.model = model
        self.tp_group, self.embd_group = groups.tp, groups.embd
        if groups.dp is None:
            raise ConfigError(
                "Groups.dp is None, and a trainer sums gradients over it; without data parallelism, give it a group of "
                "this rank alone"
            )
        self.dp_group = groups.dp
        self.sample_rank, self.num_sample_ranks = groups.data.samples
        self.pp_group = groups.pp if groups.num_stages > 1 else None
        self._chunks = cast(list[LanguageModel], list(model)) if isinstance(model, ModelChunks) else [model]
        self._pipeline: Pipeline[Tensor] | None = None
        if self.pp_group is not None:
            self._pipeline = Pipeline(self._chunks, group=self.pp_group)
        self.device = next(model.parameters()).device
        self.defers_checks = self.device.type != "cpu"
        self._mover = BatchMover(self.device)
        self._prepared: _Prepared | None = None
        self.optimizer, self.gradients, self._reduction = build_optimizer(settings, model, self._chunks, groups)
        self.zero = self.optimizer if isinstance(self.optimizer, ZeroOptimizer) else None
        self._fused = fused_adamw(self.optimizer)
        self._scale_later = None if self._fused is None else self._divide_by
        if self._fused is not None:
            # With split state, other ranks' intervals of a bucket hold sums of this rank alone.
            self._fused.clears_gradients = isinstance(self.gradients, GradientBuffers) and self.zero is None
        self.objective = CrossEntropy(self.gradients.sum_of_losses) if objective is None else objective
        self._needs_lengths = self.objective.depends_on_length or any(each.needs_lengths for each in self._chunks)
        self._model_config = self._chunks[0].config
        self._of_experts = {
            layer.layer_number - 1: layer.mlp
            for each in self._chunks
            for layer in each.modules()
            if isinstance(layer, TransformerLayer) and isinstance(layer.mlp, MoELayer)
        }
        groups.data.check_loss(type(self.objective).__name__, shares_samples=self.objective.shares_samples)
        self._reduction.check_objective(self.objective)
        self._step = self._num_micro_batches = 0
        self._seed_micro_batch = self._seed_in_order if self.gradients.seeds_micro_batches else _draw_on
        self.loss_scale = DynamicLossScale() if PRECISIONS[settings.training.dtype].scales_loss else None
        self.num_skipped = 0

    def attention_kernels(self) -> list[str]:
        """Return the kernels of the layers for samples without padding and documents, each with its reason."""
        self._seed_step(self._step)
        num_samples, model = self.settings.micro_batch_size(self.num_sample_ranks), self._chunks[0]
        view = self._model_groups.data.view(self.settings.sequence_length, None)
        like = torch.empty((), dtype=self._model_config.params_dtype, device=self.device)
        mask = AttentionMask(alibi_slopes=model.alibi_slopes, context=view.context)
        layers = (each for each in model.modules() if isinstance(each, CoreAttention))
        found = (layer.described_kernel(like.expand(num_samples, view.whole_length), mask) for layer in layers)
        return list(dict.fromkeys(found))

    def step(
        self,
        step: int,
        micro_batches: Iterable[Batch],
        num_labels: int | None = None,
        *,
        meanwhile: Callable[[], None] | None = None,
        hooks: StepHooks = NO_HOOKS,
    ) -> StepResult:
        """Run one optimizer step.

        Args:
            step: number of the step, from 0.
            micro_batches: micro-batches of this data-parallel rank.
            num_labels: number of labels in the global batch that are not ignored; divides the loss. None for all
                labels.
            meanwhile: callback for work on the host, called after all but the update was launched, before the host
                waits; or None.
            hooks: what the step calls.

        Returns:
            The result, the same on every rank.

        Raises:
            DivergenceError: the loss or the gradient is not finite; raised on every rank, before the update.
            VocabularyError: an id is out of range; with ``defers_checks``, raised on every rank, before the update.
        """
        settings = self.settings
        self._seed_step(step)
        self.model.train()
        if num_labels is None:
            num_labels = settings.training.global_batch_size * settings.sequence_length
        scale = 1.0 if self.loss_scale is None else self.loss_scale.scale
        batches = list(micro_batches)
        total = self._begin(batches, scale)
        no_sync, inputs = self.gradients.no_sync, self.objective.inputs

        def loss_of(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
            loss, means = means_of(self.objective, output, batch, num_labels)
            return (loss if self.loss_scale is None else loss * scale), means

        with self._deferred_checks() as checks:
            if self._pipeline is None:
                for number, batch in enumerate(self._mover.moved(batches)):
                    self._seed_micro_batch(number)
                    with no_sync() if number + 1 < len(batches) else contextlib.nullcontext():
                        hooks.before_action(Action(Kind.FORWARD, number))
                        loss, means = loss_of(self.model(**inputs(batch)), batch)
                        hooks.before_action(Action(Kind.BACKWARD, number))
                        loss.backward()
                    total.add(means)
            else:
                name, num_stages = settings.parallel.pipeline_schedule, self._pipeline.group.size()
                schedule = make_schedule(name, num_stages, len(batches), len(self._chunks))
                for means in self._run_pipeline(self._pipeline, schedule, batches, inputs, loss_of, no_sync, hooks):
                    total.add(means)
        self.gradients.finish()
        finalize_gradients_(self.model, tp_group=self.tp_group, dp_group=None, embd_group=self.embd_group)
        hooks.gradients(partial(self._split, "gradient"))
        largest = self._local_maxima(total, checks, hooks.rank_reports())
        numbers = self._reduction.reduce_step(total, largest, self._own_routing())
        scale_gradients_(
            self.model,
            numbers.norm.div_(scale),
            settings.optimizer.clip_grad_norm,
            loss_scale=scale,
            shares=self._reduction.shares,
            scale_later=self._scale_later,
        )
        if meanwhile is not None:
            meanwhile()
        read = self._read(numbers, checks)
        # Both are sums over all ranks, so that all ranks decide the same way, before any weight changes.
        wrong = {"loss": read.losses[0], "norm of the gradient": read.grad_norm}
        wrong = {what: value for what, value in wrong.items() if not math.isfinite(value)}
        if wrong and self.loss_scale is None:
            what, value = next(iter(wrong.items()))
            raise DivergenceError(f"the {what} is {value} at step {step}")
        hooks.before_update(step, read.rank_reports)
        learning_rate = settings.optimizer.learning_rate_at(step, settings.training.steps)
        if wrong:
            self._skip(step, hooks)
        else:
            self._update(learning_rate, numbers, hooks)
        used = None if self.loss_scale is None else scale
        mean_loss, *others = read.losses
        return StepResult(mean_loss, read.grad_norm, learning_rate, used, bool(wrong), tuple(others), read.routing)

    def _seed_step(self, step: int) -> None:
        """Seed dropout by the step, so that a resumed run draws the same masks."""
        # The ranks of a tensor-parallel group share one data-parallel stream; data-parallel ranks and stages need
        # different ones. Ranks that share samples have slices of one mask, unless each rank draws its masks alone.
        training = self.settings.training
        stage = 0 if self.pp_group is None else self.pp_group.rank()
        place = self.sample_rank if training.rng == "global" else self.dp_group.rank()
        seed_streams(_stream_seed(training.seed, step, place, stage), self.tp_group.rank(), rng=training.rng)
        self._step = step

    def _begin(self, batches: Sequence[Batch], scale: float) -> Total:
        """Prepare gradients and layers of experts for a step; return the empty sum of its losses."""
        total = self._new_total(self.objective)
        self.gradients.begin(len(batches))
        self._num_micro_batches = len(batches)
        for layer in self._of_experts.values():
            # A rehearsal may have no micro-batches.
            layer.begin(scale / (max(1, len(batches)) * self.num_sample_ranks))
        return total

    def _skip(self, step: int, hooks: StepHooks) -> None:
        """Skip the update of a step whose gradient overflowed, and lower the scale of the loss."""
        assert self.loss_scale is not None
        hooks.updated(partial(self._split, "data"))
        self.loss_scale.skip_(step)
        self.num_skipped += 1

    def _update(self, learning_rate: float, numbers: Numbers, hooks: StepHooks) -> None:
        set_learning_rate_(self.optimizer, learning_rate)
        hooks.clipped(partial(self._split, "gradient"))
        self.optimizer.step()
        for number, layer in self._of_experts.items():
            assert numbers.routing is not None
            loads = numbers.routing.view(self._model_config.num_layers, -1)[number, : layer.spec.num]
            layer.router.balance_(loads)
        hooks.updated(partial(self._split, "data"))
        if self._fused is not None and self._fused.has_cleared:
            self.gradients.are_clear = True
        if self.loss_scale is not None:
            self.loss_scale.keep_()

    def _divide_by(self, scale: Tensor) -> None:
        assert self._fused is not None
        self._fused.grad_scale = scale

    def _new_total(self, objective: Objective) -> Total:
        return self.gradients.total(torch.zeros(1 + len(objective.names), dtype=torch.float64, device=self.device))

    def _seed_in_order(self, micro_batch: int) -> None:
        """Seed dropout by the micro-batch's position in the global batch, whichever rank runs it."""
        training, number = self.settings.training, self.sample_rank * self._num_micro_batches + micro_batch
        seed_streams(_stream_seed(training.seed, self._step, number, 0), self.tp_group.rank(), rng=training.rng)

    def _run_pipeline(
        self,
        pipeline: Pipeline[Tensor],
        schedule: Schedule,
        batches: Sequence[Batch],
        inputs: Callable[[Batch], dict[str, Tensor | None]],
        results: Callable[[Tensor, Batch], tuple[Tensor | None, Tensor]],
        no_sync: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
        hooks: StepHooks = NO_HOOKS,
    ) -> list[Tensor]:
        """Run the schedule; on the last stage, return the second value of ``results`` for each micro-batch."""

        def loss(micro_batch: int, output: Tensor) -> tuple[Tensor | None, Tensor]:
            return results(output, moved[micro_batch])

        moved = list(self._mover.moved(batches))
        config = self._chunks[0].config
        shapes = {(self._chunks[0].view_of(s).size, b) for b, s in (batch.tokens.shape for batch in batches)}

        def forward(micro_batch: int, chunk: int) -> Tensor:
            if torch.is_grad_enabled():
                self._seed_micro_batch(micro_batch)
            output: Tensor = self._chunks[chunk](**inputs(moved[micro_batch]))
            return output

        return pipeline.run(
            schedule,
            forward,
            loss,
            shape=(*(shapes.pop() if len(shapes) == 1 else (None, None)), config.hidden_size),
            dtype=config.params_dtype,
            device=self.device,
            forward_only=not torch.is_grad_enabled(),
            no_sync=no_sync,
            hooks=hooks,
        )

    def _deferred_checks(self) -> AbstractContextManager[DeferredChecks | None]:
        return DeferredChecks() if self.defers_checks else contextlib.nullcontext()

    def _split(self, kind: Literal["gradient", "data"]) -> dict[Parameter, tuple[Tensor, dict[str, list[Any]]]]:
        """Return the tensors that data-parallel ranks have parts of, with zeros in the parts of other ranks."""
        found = {}
        for param, share in (self._reduction.shares or {}).items():
            own: Tensor = getattr(share, kind)
            whole = own.new_zeros(param.numel())
            low, high = share.interval
            whole[low:high] = own
            found[param] = whole.view(param.shape), {"dp": ["P"], "cp": ["P"]}
        return found

    def _local_maxima(self, total: Total, checks: DeferredChecks | None, rank_reports: Sequence[float] = ()) -> Tensor:
        """Return the rank reports, and whether a check failed, without waiting for the device."""
        largest = numbers_without_sync(rank_reports, total.tensor)
        if checks is None:
            return largest
        return torch.cat([largest, checks.failed(self.device).to(largest.dtype).unsqueeze(0)])

    def _own_routing(self) -> Tensor | None:
        """Return the statistics of this rank's layers of experts, with zeros for those of other stages."""
        if self._model_config.experts is None:
            return None
        every = torch.zeros(
            self._model_config.num_layers, self._model_config.experts.num + 3, dtype=torch.float64, device=self.device
        )
        for number, layer in self._of_experts.items():
            assert layer.statistics is not None
            every[number] = layer.statistics
        return every.view(-1)

    def _read(self, numbers: Numbers, checks: DeferredChecks | None) -> _ReadNumbers:
        """Read the numbers of a step. This is the only place where the host waits for the device, once per step."""
        routing = numbers.norm.new_zeros(0)
        if numbers.routing is not None:
            assert self._model_config.experts is not None
            every = numbers.routing.view(self._model_config.num_layers, -1)
            micro_batches = self._num_micro_batches * self.num_sample_ranks
            routing = metrics_of(every, self._model_config.experts, micro_batches)
        norm, *read = torch.cat([numbers.norm.view(1), routing, numbers.sums, numbers.largest]).tolist()
        metrics, read = dict(zip(METRICS, read[: len(routing)], strict=False)), read[len(routing) :]
        if checks is not None and read.pop():
            agree(checks.run, group=self._reduction.groups)
        num_losses = len(numbers.sums)
        return _ReadNumbers(read[:num_losses], norm, read[num_losses:], metrics)

    def wait_for_weights(self) -> None:
        """Wait until the last step's weights are complete; needed before code other than a forward reads them."""
        if self.zero is not None:
            self.zero.parameters.wait()

    def check_copies(self, done: int) -> None:
        """Raise DesyncError on every rank unless ranks hold the same copies of parameters after ``done`` steps."""
        self.wait_for_weights()
        remedy = (
            f"they drifted apart in the first {done} steps, so a gradient or an update differs between ranks: "
            "`shardwise doctor train` with the same settings names it"
        )
        check_replicas(self.model, **_of_replicas(self._model_groups), remedy=remedy)

    def train_step(self, step: int, loader: DataLoader, hooks: StepHooks = NO_HOOKS) -> StepResult:
        """Run ``step`` on this rank's samples of ``loader``; meanwhile, copy those of the next step to the GPU."""
        prepared, self._prepared = self._prepared, None
        if prepared is None or prepared[:2] != (step, loader):
            prepared = self._prepare(step, loader)
        self._mover.wait()

        def prepare_next() -> None:
            if step + 1 < self.settings.training.steps:
                self._prepared = self._prepare(step + 1, loader)

        meanwhile = None if self.device.type == "cpu" else prepare_next
        with contextlib.nullcontext() if hooks.routing is None else hooks.routing.step(step):
            return self.step(step, prepared[2], loader.num_labels(step), meanwhile=meanwhile, hooks=hooks)

    def _prepare(self, step: int, loader: DataLoader) -> _Prepared:
        rank, num_ranks = self.sample_rank, self.num_sample_ranks
        micro = self.settings.micro_batch_size(num_ranks)
        batches = loader.batch(step, rank, num_ranks, micro, with_lengths=self._needs_lengths)
        return step, loader, [self._mover.start(batch) for batch in batches]

    def evaluate(self, held_out: HeldOut) -> dict[str, float]:
        """Return the objective's metrics on held-out rows by name, the same on every rank."""
        objective = self.objective.for_evaluation
        total = self._new_total(objective)
        with self._deferred_checks() as checks:
            self.measure(
                held_out, lambda output, batch: total.add(means_of(objective, output, batch, 1, torch.float64)[1])
            )
        numbers = self._reduction.reduce_evaluation(total, self._local_maxima(total, checks))
        return objective.held_out(self._read(numbers, checks).losses, held_out)

    @torch.no_grad()
    def measure(self, held_out: HeldOut, each: Callable[[Tensor, Batch], None]) -> None:
        """Run the model in evaluation mode on this rank's held-out rows, and call ``each`` for each batch.

        Args:
            held_out: held-out rows of all ranks.
            each: callback for the output and the batch, called on the last stage.
        """
        self.wait_for_weights()
        inputs = self.objective.for_evaluation.inputs
        rank, num_ranks = self.sample_rank, self.num_sample_ranks
        micro = self.settings.micro_batch_size(num_ranks)
        batches = held_out.batches(micro, rank, num_ranks, with_lengths=self._needs_lengths)
        if self._pipeline is None:
            for output, batch in outputs_of(self._chunks[0], batches, inputs, self._mover):
                each(output, batch)
            return
        self.model.eval()

        def handed(output: Tensor, batch: Batch) -> tuple[None, Tensor]:
            each(output, batch)
            return None, output.new_empty(0)

        num_stages, num_chunks = self._pipeline.group.size(), len(self._chunks)
        # Take enough batches to keep the stages busy, but a limited number, to save memory.
        while several := list(itertools.islice(batches, _BATCHES_PER_STAGE * num_stages)):
            schedule = forward_only(num_stages, len(several), num_chunks)
            self._run_pipeline(self._pipeline, schedule, several, inputs, handed)


def _of_replicas(groups: Groups) -> dict[str, Any]:
    return {
        "tp_group": groups.tp,
        "dp_group": groups.dp,
        "pp_group": groups.pp,
        "expert_dp_group": groups.expert_dp,
    }


def _draw_on(micro_batch: int) -> None:
    """Do nothing: each micro-batch continues the random streams of the one before."""


def _stream_seed(seed: int, step: int, dp_rank: int, stage: int) -> int:
    # Use fewer than 64 bits, because the tensor-parallel stream adds its rank. The first stage draws the same numbers
    # as a run without stages.
    entropy = (seed, step, dp_rank, stage) if stage else (seed, step, dp_rank)
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(2))
