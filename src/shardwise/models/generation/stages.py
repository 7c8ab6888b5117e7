"""The pipeline stages of a model that generates, which read different passes at the same time.

All ranks schedule the same pass in each step. Stage ``i``, from 0, reads the one that was scheduled ``i`` steps before,
whose hidden states it received at the end of the last step. What the last stage chooses and measures is sent to all
stages, which accept it at the end of the same step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.communication.agreement import agree, check_same
from shardwise.core.communication.collectives import Transfer, exchange
from shardwise.core.communication.context import device_of_host_facts
from shardwise.core.errors import ConfigError
from shardwise.core.topology import Groups
from shardwise.models.by_plan.model import PlannedModel
from shardwise.models.generation.cache import CausalModel, kind_of_cache
from shardwise.models.generation.sequences import Work
from shardwise.models.gpt import GPT


class Answer(NamedTuple):
    """What the last stage chose and measured in a pass.

    Attributes:
        ids: ``[n]`` int64: the chosen tokens, then those whose log-probabilities are measured.
        values: ``[m]``, the log-probabilities of the latter; fp32, or fp64 of an fp64 model.
    """

    ids: Tensor
    values: Tensor


class Stages:
    """The passes that the stages of a model have in work, and their messages. One stage has one pass and sends nothing.

    Args:
        model: the model, or this rank's stage of it.

    Attributes:
        number: number of stages.
        is_last: whether this is the last stage, which has the output layer.

    Raises:
        ConfigError: the model is not the stage of its place in the pipeline-parallel group, or has several chunks of
            layers.
    """

    def __init__(self, model: CausalModel) -> None:
        groups = Groups(tp=model.tp_group) if isinstance(model, PlannedModel) else model.groups
        self._model, self._group, self.number = model, groups.pp, groups.num_stages
        self._place = 0 if groups.pp is None else groups.pp.rank()
        self.is_last = self._place == self.number - 1
        chunks = 1 if isinstance(model, PlannedModel) else model.config.virtual_pipeline_model_parallel_size or 1
        if (model.pre_process, model.post_process) != (self._place == 0, self.is_last) or chunks > 1:
            raise ConfigError(
                "generation needs the whole model on each rank, or one chunk of it on each stage of Groups.pp; this "
                f"is stage {self._place + 1} of {self.number}, with pre_process={model.pre_process}, post_process="
                f"{model.post_process} and {chunks} {'chunk' if chunks == 1 else 'chunks'}"
            )
        # Those that are not accepted, the newest first.
        self._passes: deque[Sequence[Work]] = deque()
        self._arrived: Tensor | None = None

    @property
    def are_busy(self) -> bool:
        """True if a pass is not accepted."""
        return any(self._passes)

    def check_same(self, value: str, what: str) -> None:
        """Raise DesyncError on every rank of all stages unless ``value`` is equal on all of them."""
        if self._group is None or self.number == 1:
            check_same(value, what, group=self._model.tp_group)
        else:
            agree(partial(check_same, value, what, group=self._model.tp_group), group=self._group)
            check_same(value, what, group=self._group)

    def begin(self, works: Sequence[Work]) -> tuple[Sequence[Work], Tensor | None]:
        """Take a new pass; return the one that this stage reads in this step, maybe empty, and its hidden states.

        The first stage has none.
        """
        self._passes.appendleft(works)
        arrived, self._arrived = self._arrived, None
        own = self._passes[self._place] if len(self._passes) > self._place else ()
        return own, arrived

    def oldest(self) -> Sequence[Work]:
        """Remove and return the pass that the last stage has read in this step, maybe empty."""
        return self._passes.pop() if len(self._passes) == self.number else ()

    def exchange(self, hidden: Tensor | None, answer: Answer | None, sizes: tuple[int, int]) -> Answer:
        """Send and receive messages at the end of a step; return the answer of the oldest pass. Every stage calls.

        Args:
            hidden: what this stage computed for the next one, ``[s, 1, h]`` or this rank's shard, or None.
            answer: what the last stage found; None on other stages.
            sizes: numbers of ids and values of the answer; 0 if there is none.
        """
        if answer is None:
            answer = Answer(torch.empty(sizes[0], dtype=torch.int64), torch.empty(sizes[1]))
        if self._group is None or self.number == 1:
            return answer
        assert isinstance(self._model, GPT)
        dtype, device = kind_of_cache(self._model)
        last, sends, receives = self.number - 1, list[Transfer](), list[Transfer]()
        if hidden is not None:
            sends.append(Transfer(hidden.to(dtype).contiguous(), self._place + 1))
        coming = self._passes[self._place - 1] if 0 < self._place <= len(self._passes) else ()
        if coming:
            s = self._model.view_of(sum(work.stop - work.start for work in coming)).size
            empty = torch.empty(s, 1, self._model.config.hidden_size, dtype=dtype, device=device)
            receives.append(Transfer(empty, self._place - 1))
        self._arrived = next(iter(_exchanged(sends, receives, self._group)), None)
        # Apart, because hosts exchange numbers that they read over another backend, if there is one.
        host, wide = device_of_host_facts(self._group, device), torch.promote_types(dtype, torch.float32)
        answer = Answer(answer.ids.to(host), answer.values.to(host, wide))
        parts = [(tag, part) for tag, part in enumerate(answer) if part.numel() > 0]
        if self.is_last:
            _exchanged([Transfer(part, place, tag) for place in range(last) for tag, part in parts], [], self._group)
        else:
            # Into the tensors of the answer.
            _exchanged([], [Transfer(part, last, tag) for tag, part in parts], self._group)
        return answer

    def clear(self) -> None:
        """Drop all passes. All stages have made the same steps."""
        self._passes.clear()
        self._arrived = None


def _exchanged(sends: Sequence[Transfer], receives: Sequence[Transfer], group: ProcessGroup) -> list[Tensor]:
    sent, coming = exchange(sends, receives, group=group)
    received = [pending.wait() for pending in coming]
    for pending in sent:
        pending.wait()
    return received
