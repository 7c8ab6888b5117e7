"""A causal model of transformers, split by its own plan, with the forward of a language model."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.sharded_state import state_of_parts
from shardwise.core.sharding import ParamShard, ShardedOffset
from shardwise.core.topology import Groups
from shardwise.models.by_plan import library
from shardwise.models.by_plan.parallelize import split_
from shardwise.models.config import ModelConfig
from shardwise.models.language_model import LanguageModel
from shardwise.models.model_input import check_tensors
from shardwise.nn.column import ColumnLinear

T = TypeVar("T")

# Kinds of layers whose masks keep texts of one row apart.
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


class PlannedCache:
    """The states of earlier tokens in a ``PlannedModel``, as transformers keeps them.

    Attributes:
        states: a ``Cache`` of transformers.
        length: number of tokens.
        is_complete: False during a pass, and after one that failed part-way.
        capacity: number of tokens that it may hold; it grows as needed.
    """

    capacity = sys.maxsize

    def __init__(self, model: PlannedModel) -> None:
        self._model = model.whole
        self.truncate(0)

    def kept(self, length: int) -> int:
        """Return how many of the first ``length`` tokens can be kept.

        None if a layer has forgotten some, or sums, or if a pass failed part-way.
        """
        kinds = {type(self.states).__name__, *(type(layer).__name__ for layer in self.states.layers)}
        is_whole = kinds <= {"DynamicCache", "DynamicLayer"}
        return length if self.is_complete and (is_whole or length == self.length) else 0

    def truncate(self, length: int) -> None:
        """Drop all but the first ``length`` tokens; ``kept(length)`` must be ``length``. 0 empties the cache."""
        if length == 0:
            self.states, self.length, self.is_complete = library.new_cache(self._model), 0, True
        elif length != self.length:
            self.states.crop(length - self.length)
            self.length = length


class PlannedModel(LanguageModel):
    """A causal model of transformers, split over ``groups.tp`` by its own plan.

    Parameters keep the names of transformers in ``sharded_state_dict``. They have no values before they are loaded,
    but for buffers that files do not have.

    Args:
        config: the model, as ``library.describe`` describes it; its device is PyTorch's default device.
        groups: process groups.

    Raises:
        ConfigError: the model cannot be split, or the configuration asks for what a plan does not have: stages,
            sequence or context parallelism, exact mode, recomputation but of each layer, dropout on several ranks.
    """

    pre_process = post_process = True
    parallel_output = False
    rotary = None
    rerouting = None
    vocab_size: int

    def __init__(self, config: ModelConfig, *, groups: Groups) -> None:
        # First, because exact mode is a state of the groups.
        self._name = library.name_of(config)
        self._check(config, groups)
        super().__init__(config, groups)
        self.vocab_size, self.max_sequence_length = config.vocab_size, config.max_sequence_length
        self.share_embeddings_and_output_weights = config.share_embeddings_and_output_weights
        device = torch.get_default_device()
        # A plan of a run (``shardwise.plan``) has parameters without values, as the meta device has anyway.
        with unset_fake_temporarily():
            self.whole = library.build(config)
            if groups.tp.size() > 1 or library.has_plan(type(self.whole).__name__):
                split_(self.whole, groups, lambda: True)
        if device.type != "meta":
            library.allocate_(self.whole, device)
        if config.recompute.is_of_each_layer:
            self.whole.activation_checkpointing_enable()
        parameters = inspect.signature(self.whole.forward).parameters
        self._keeps_logits = "logits_to_keep" in parameters
        # Of models without attention, the argument is the state of their layers.
        self._cache_argument = "cache_params" if "cache_params" in parameters else "past_key_values"
        # RoBERTa and its kin count positions from the row after that of padding.
        self._first_position = max(
            (
                each.padding_idx + 1
                for each in self.whole.modules()
                if hasattr(each, "create_position_ids_from_input_ids") and type(each.padding_idx) is int
            ),
            default=0,
        )
        self.max_sequence_length -= self._first_position
        self._mixes_texts = False

    def _check(self, config: ModelConfig, groups: Groups) -> None:
        dropout, several = max(config.hidden_dropout, config.attention_dropout), groups.tp.size() > 1
        for is_asked, what in (
            (groups.num_stages > 1, "Groups.pp has several stages; make the topology without pp"),
            (groups.data.group is not None, "Groups.cp has several ranks; make the topology without cp"),
            (config.sequence_parallel and several, "sequence_parallel is True; set it to False"),
            (config.exact_parts is not None, f"exact_parts is {config.exact_parts}; set it to None"),
            (
                config.recompute.granularity != "none" and not config.recompute.is_of_each_layer,
                f"recompute is {config.recompute}; set it to full (uniform, 1 layer)",
            ),
            (
                dropout > 0 and several,
                f"dropout is {dropout:g} over several ranks; set hidden_dropout and attention_dropout to 0",
            ),
        ):
            if is_asked:
                raise ConfigError(f"{self._name} is split by its own plan, which cannot do this: {what}")

    @property
    def layers(self) -> nn.ModuleList:
        """The layers: the first list of modules of that length."""
        lists = (each for each in self.whole.modules() if isinstance(each, nn.ModuleList))
        return next(each for each in lists if len(each) == self.config.num_layers)

    @property
    def described_loss(self) -> str:
        """How several ranks compute the loss, for the banner."""
        if not isinstance(self.whole.get_output_embeddings(), ColumnLinear):
            return "the plan leaves the head whole"
        reader = library.other_use_of_logits(type(self.whole))
        return f"the loss gathers logits, which {reader} reads" if reader else "the loss splits the vocabulary"

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        document_ids: Tensor | None = None,
        lengths: Tensor | None = None,
        cache: PlannedCache | None = None,
    ) -> Tensor:
        """Return the loss of each token, or logits without ``labels``.

        Args:
            input_ids: ``[b, s]`` token ids.
            position_ids: ``[s]`` or ``[b, s]``; None means 0 to ``s - 1``.
            attention_mask: ``[b, s]``, 1 for tokens and 0 for padding; with a cache ``[b, keys]``.
            labels: ``[b, s]`` ids to predict; -100 has loss 0.
            document_ids: ``[b, s]``, for several texts in one row; ``position_ids`` then start at 0 in each.
            lengths: not read.
            cache: states of earlier tokens, for generation; give ``position_ids`` with it.

        Returns:
            Loss ``[b, s]``, or logits ``[s, b, v]``; the same on every rank.

        Raises:
            ShardingError: an input is not a tensor, or has the wrong shape.
            ConfigError: texts share a row, and the model does not keep them apart: it has layers without attention, or
                ``check_causal`` found that a text depends on the one before.
        """
        check_tensors(input_ids, labels, position_ids=position_ids, attention_mask=attention_mask)
        if document_ids is not None:
            self._check_attention()
        logits = self._logits(input_ids, position_ids, attention_mask, cache)
        if labels is None:
            return logits.transpose(0, 1)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return losses.view_as(labels)

    def next_logits(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        cache: PlannedCache | None = None,
    ) -> Tensor:
        """Return the logits of the token after each sequence, ``[b, v]``; arguments as for ``forward``."""
        options = {"logits_to_keep": 1} if self._keeps_logits else {}
        return self._logits(input_ids, position_ids, attention_mask, cache, **options)[:, -1]

    def _logits(
        self,
        ids: Tensor,
        positions: Tensor | None,
        mask: Tensor | None,
        cache: PlannedCache | None,
        **options: Any,
    ) -> Tensor:
        positions = None if positions is None else (positions + self._first_position).expand(ids.size(0), -1)
        states = None if cache is None else cache.states
        options |= {"position_ids": positions, "attention_mask": mask, self._cache_argument: states}
        if cache is not None:
            cache.is_complete = False
        logits: Tensor = self.whole(input_ids=ids, use_cache=cache is not None, **options).logits
        if cache is not None:
            cache.length, cache.is_complete = cache.length + ids.size(1), True
        return logits

    @torch.no_grad()
    def check_causal(self) -> None:
        """Check by a forward that no token sees those after it; every rank of the group calls.

        Also find whether the texts of a row are kept apart, which ``forward`` needs for ``document_ids``.

        Raises:
            ConfigError: one does, so that neither a loss nor a text means anything; or the forward fails on token ids.
        """
        ids = self._trial_ids()
        ids[1, -1] = 0
        logits = self._tried(lambda: self._logits(ids, None, None, None))
        # Rows of one product may be rounded differently, which layers of 16 bits increase.
        most = (1e-3 if logits.dtype.itemsize > 2 else 0.1) * logits.abs().max()
        if (logits[0, :-1] - logits[1, :-1]).abs().max() > most:
            is_encoder = getattr(self.whole.config, "is_decoder", None) is False
            remedy = ' (in config.json, "is_decoder" is false)' if is_encoder else ""
            raise ConfigError(f"{self._name} lets tokens see those after them, so it is no language model{remedy}")
        self._mixes_texts = self._sees_text_before()

    def _sees_text_before(self) -> bool:
        """Return whether the second text of a row, whose positions begin again, depends on the first."""
        ids = self._trial_ids()[0]
        positions = torch.arange(3, device=ids.device).repeat(2)

        def second(first: Tensor) -> Tensor:
            return self._logits(torch.cat([first, ids[3:]])[None], positions, None, None)[0, 3:]

        try:
            one, other = self._tried(lambda: (second(ids[:3]), second(ids[3:])))
        except ConfigError:
            # Its forward takes no positions.
            return True
        # The rows have one shape, so only products of chosen rows, as of experts, are rounded differently.
        most = (1e-3 if one.dtype.itemsize > 2 else 0.05) * one.abs().max()
        return bool((one - other).abs().max() > most)

    @torch.no_grad()
    def check_cache(self) -> None:
        """Check that logits with the states of earlier tokens are those without; every rank of the group calls.

        Raises:
            ConfigError: they are not, so that generated texts would be others; or the model has a cache of its own.
        """
        ids = self._trial_ids()[:1]
        cache = PlannedCache(self)

        def logits() -> tuple[Tensor, Tensor]:
            parts = [
                self.next_logits(ids[:, a:b], torch.arange(a, b, device=ids.device), cache=cache)
                for a, b in pairwise((0, 3, 4, 5, 6))
            ]
            return self._logits(ids, None, None, None)[0, 2:], torch.cat(parts)

        whole, cached = self._tried(logits)
        # Experts may be chosen otherwise after rounding.
        apart, size = float((whole - cached).abs().max()), float(whole.max() - whole.min())
        if not apart <= (1e-2 if whole.dtype.itemsize > 2 else 0.2) * size:
            raise ConfigError(
                f"{self._name} gives other logits with its cache of earlier tokens than without ({apart:.1e} apart of "
                f"{size:.1e}), so its texts would be wrong; another version of transformers may be right"
            )

    def _trial_ids(self) -> Tensor:
        """Return two equal rows of six ids, ``[2, 6]``, from the end of the vocabulary, where few are special."""
        ids = self.vocab_size - 1 - torch.arange(6, device=next(self.parameters()).device) % self.vocab_size
        return ids.repeat(2, 1)

    def _tried(self, compute: Callable[[], T]) -> T:
        was_training = self.training
        self.eval()
        try:
            return compute()
        except ShardwiseError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{self._name} cannot be used: its forward on token ids fails: {library.first_line(error)}"
            ) from error
        finally:
            self.train(was_training)

    def _check_attention(self) -> None:
        config = self.whole.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or _ATTENTION)
        if others := sorted(kinds - _ATTENTION):
            raise ConfigError(
                f"{self._name} has layers of {', '.join(others)}, whose state would pass from one text of a row to the "
                "next; leave out --packing"
            )
        if self._mixes_texts:
            raise ConfigError(
                f"{self._name} does not keep the texts of a row apart: what a text gives depends on the one before it; "
                "leave out --packing"
            )

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Sequence[ShardedOffset] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, ParamShard]:
        """Return this rank's part of every parameter and persistent buffer, by its name in transformers."""
        return state_of_parts(self.whole, prefix, sharded_offsets, metadata, group=self.tp_group)
