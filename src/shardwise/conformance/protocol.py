"""The functions that a target offers: one layer of translation between the catalogue and a library.

A target is a module with some of these functions, at module level, with these arguments or without the optional ones.
A case names the functions and arguments that it needs. It is "not offered" if the target lacks one, or raises
NotImplementedError.

Whole tensors go in: the target cuts them as its library does. Modules that functions return are called as stated, with
this rank's process groups ``groups``: ``groups.tp`` splits each layer, ``groups.pp`` holds stages, ``groups.embd`` is
the first and the last stage, and those of experts are as in ``core.topology.Groups``. ``groups.dp`` sees different
samples, except that the ranks of ``groups.cp`` see different positions of the same samples. ``s b i o h v`` are
sequence, batch, input features, output features, hidden size and vocabulary, and ``t`` is the size of ``groups.tp``.
Part ``n/t`` is ``dense_comparison.part``: consecutive, of ``sizes(n, t)``.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwise.conformance.dense import Batch, Sizes
from shardwise.conformance.dense_experts import ExpertSizes
from shardwise.core.topology import Groups


class DataParallel(Protocol):
    """A module whose gradients become the mean over ``groups.dp``."""

    def __call__(self, *inputs: Tensor) -> Any:
        """Run the module's forward."""

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which backward passes accumulate without communication."""

    def finish(self) -> None:
        """Complete the gradients after the last backward."""


class Optimizer(Protocol):
    """AdamW with learning rate 1e-2, betas 0.9 and 0.95, epsilon 1e-8 and no weight decay."""

    def step(self) -> None:
        """Update the parameters from complete gradients, and clear the gradients."""

    def num_state_elements(self) -> int:
        """Return how many elements of running means this rank keeps, both means together."""


class Target(Protocol):
    """Every function of the protocol; a target has any of them.

    Attributes:
        precision: dtype of the least precise step in a computation in fp64; fp64 if missing.
        uneven: truthy if sizes need not divide by the ranks.
        uneven_sequence: the same for the sequence's length under sequence parallelism.
        few_kv_heads: truthy if a model may have fewer key-value heads than ranks, or a number that does not divide.
        ignored_labels: truthy if labels of -100 cost nothing.
        padded_vocabulary: truthy if logits may be wider than ``vocab``.
        windows, sinks, latent_attention, length_scaling: truthy if models may have ``window``, ``sinks``, ``latent`` or
            ``trained_length`` of ``dense.Sizes``.
        one_draw: truthy if initial weights do not depend on the number of ranks.
        versions: versions for the report, such as ``{"torch": "2.13.0"}``.
    """

    precision: torch.dtype
    uneven: bool
    uneven_sequence: bool
    few_kv_heads: bool
    ignored_labels: bool
    padded_vocabulary: bool
    windows: bool
    sinks: bool
    latent_attention: bool
    length_scaling: bool
    one_draw: bool
    versions: dict[str, str]

    def prepare(self) -> None:
        """Import the library, once in each rank, and raise an error if that is impossible. Optional."""

    def start(self, groups: Groups) -> None:
        """Prepare this rank before a case, for a library with ambient groups. Optional, as is ``stop``."""

    def stop(self) -> None:
        """Undo ``start`` after a case, also after a failure."""

    def sizes(self, n: int, t: int) -> list[int]:
        """Return the sizes of ``n`` elements' parts on ``t`` ranks. Optional: the first ``n % t`` have one more."""

    def column_linear(
        self,
        weight: Tensor,
        bias: Tensor | None,
        groups: Groups,
        *,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        sequence_length: int | None = None,
    ) -> nn.Module:
        """Make a linear layer whose output features are split.

        Args:
            weight, bias: whole, ``[o, i]`` and ``[o]``.
            gather_output: return all features.
            skip_bias_add: return the output without the bias, and this rank's part of the bias.
            sequence_length: ``s`` if the input is this rank's part of the sequence, which the layer gathers.

        Returns:
            Module from ``[s, b, i]`` (``[s/t, b, i]`` with ``sequence_length``) to ``[s, b, o/t]`` or ``[s, b, o]``.
        """

    def row_linear(
        self,
        weight: Tensor,
        bias: Tensor | None,
        groups: Groups,
        *,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        sequence_length: int | None = None,
    ) -> nn.Module:
        """Make a linear layer whose input features are split.

        Args:
            weight, bias: whole, ``[o, i]`` and ``[o]``.
            input_is_parallel: whether the input is this rank's features; otherwise the layer splits it.
            skip_bias_add: return the output without the bias, and the whole bias.
            sequence_length: ``s`` if the output is this rank's part of the sequence.

        Returns:
            Module from ``[s, b, i/t]`` (or ``[s, b, i]``) to ``[s, b, o]``, ``[s/t, b, o]`` with ``sequence_length``.
        """

    def norm(self, weight: Tensor, bias: Tensor, groups: Groups) -> nn.Module:
        """Make a LayerNorm, eps 1e-5, over this rank's part of the sequence, ``[s/t, b, h]``; parameters ``[h]``."""

    def embedding(self, weight: Tensor, groups: Groups, *, sequence_length: int | None = None) -> nn.Module:
        """Make an embedding whose rows are split, from whole ``[v, h]``.

        Returns:
            Module from ids ``[b, s]`` to ``[b, s, h]``; with ``sequence_length`` to ``[s/t, b, h]``.
        """

    def cross_entropy(
        self, logits: Tensor, labels: Tensor, groups: Groups, *, vocab: int, label_smoothing: float = 0.0
    ) -> Tensor:
        """Return the loss of each label ``[...]`` from this rank's logits ``[..., v/t]``.

        Smoothing ``a`` gives each id but the label the probability ``a / (v - 1)``. Label -100 has loss 0, if the
        target has a truthy ``ignored_labels``.
        """

    def copy(self, tensor: Tensor, groups: Groups) -> Tensor:
        """Return the tensor, the same on every rank; in the backward the ranks' gradients are partial sums."""

    def reduce(self, tensor: Tensor, groups: Groups) -> Tensor:
        """Sum the ranks' tensors; in the backward the gradient is the same on every rank, and stays."""

    def gather_sequence(self, tensor: Tensor, groups: Groups) -> Tensor:
        """Gather ``[s/t, ...]`` to ``[s, ...]``; in the backward the ranks' gradients are partial sums."""

    def scatter_sequence(self, tensor: Tensor, groups: Groups) -> Tensor:
        """Split ``[s, ...]``, the same on every rank, to ``[s/t, ...]``; the backward gathers."""

    def reduce_scatter_sequence(self, tensor: Tensor, groups: Groups) -> Tensor:
        """Sum ``[s, ...]`` over the ranks and keep ``[s/t, ...]``; the backward gathers."""

    def finalize_gradients(self, module: nn.Module, groups: Groups) -> None:
        """Complete gradients after the last backward: sum partial ones over ``groups.tp``, all over ``groups.dp``."""

    def whole_gradients(self, module: nn.Module, groups: Groups) -> dict[str, Tensor]:
        """Return gradients by name: split ones joined over ``groups.tp``, others as this rank holds them.

        Names are ``weight`` and ``bias``, ``a`` and ``b`` of adapters, or those of ``DenseModel`` or ``DenseExperts``.
        Experts are joined over ``groups.experts``.
        """

    def whole_parameters(self, module: nn.Module, groups: Groups) -> dict[str, Tensor]:
        """Return the parameters in the same way."""

    def grad_norm(self, module: nn.Module, groups: Groups) -> float:
        """Return the 2-norm of the whole model's complete gradients."""

    def clip(self, module: nn.Module, max_norm: float, groups: Groups) -> float:
        """Scale complete gradients in place to at most this norm, and return the norm before."""

    def data_parallel(self, module: nn.Module, groups: Groups) -> DataParallel:
        """Wrap a plain PyTorch module. Some ranks may not use some parameters in a step."""

    def optimizer(self, model: nn.Module, groups: Groups, *, split_state: bool = False) -> Optimizer:
        """Make the optimizer of a ``language_model``, or of a plain module; ``split_state`` over ``groups.dp``."""

    def language_model(
        self, sizes: Sizes, weights: dict[str, Tensor], groups: Groups, *, sequence_parallel: bool = False
    ) -> nn.Module:
        """Make the model of ``dense.DenseModel`` from its whole weights, with tensor parallelism.

        Returns:
            Module from ids and labels ``[b, s]``, the same on every rank of ``groups.tp``, to losses ``[b, s]``.
            Label -100 has loss 0 if the target has a truthy ``ignored_labels``.
        """

    def context_model(
        self,
        sizes: Sizes,
        weights: dict[str, Tensor],
        groups: Groups,
        *,
        sequence_parallel: bool = False,
        by_heads: bool = False,
    ) -> nn.Module:
        """Make a ``language_model`` whose samples are shared by the ranks of ``groups.cp``, each with some positions.

        Args:
            sizes, weights, groups, sequence_parallel: as for ``language_model``.
            by_heads: whether the ranks exchange positions for heads in attention (Ulysses).

        Returns:
            Module from ids and labels of whole samples ``[b, s]`` to the losses ``[b, n]`` of this rank's ``n``
            positions, and these positions ``[n]``. The third argument is None, or the number of each token's document
            ``[b, s]``: a token sees only its document, and the length of the text is that of the document. The fourth
            argument is None, or ``[b, s]`` with False for padding, before or after the tokens.
        """

    def expert_layer(
        self,
        sizes: ExpertSizes,
        weights: dict[str, Tensor],
        groups: Groups,
        *,
        sequence_length: int | None = None,
        context_length: int | None = None,
        micro_batches: int = 1,
    ) -> nn.Module:
        """Make a router and experts, ``dense_experts.DenseExperts``, from whole weights, whose dtype the layer has.

        ``groups.experts`` together hold all experts, ``groups.expert_tp`` split each, and ``groups.expert_dp`` hold the
        same parts of the same ones. No token is dropped. The router computes in fp32 at least. The backward adds the
        gradient of the auxiliary losses: after ``finalize_gradients``, that of their mean over micro-batches and over
        the ranks that see different samples.

        Args:
            sizes: sizes of the layer.
            weights: whole, by the names of ``DenseExperts``.
            sequence_length: ``s`` if the input is this rank's part of the sequence.
            context_length: ``s`` if the ranks of ``groups.cp`` have different positions of the same samples, as many
                each.
            micro_batches: number of forwards before ``finalize_gradients``.

        Returns:
            Module from this rank's samples ``[s, b, h]`` (``[s/t, b, h]`` with ``sequence_length``) to the same shape.
            Ranks of ``groups.dp`` may have different numbers of tokens.
        """

    def other_models(self, groups: Groups) -> dict[str, tuple[nn.Module, nn.Module]]:
        """Return more of the library's models with norms of queries and keys, by name: each on one rank, and split.

        Both are called as a ``language_model``, with ids below 32. ``whole_gradients`` of the split one has the names
        of the parameters of the other, without a first ``inner.``.
        """

    def accumulate(self, model: nn.Module, batches: Sequence[Batch], groups: Groups) -> Tensor:
        """Run forward and backward of this data-parallel rank's micro-batches, and complete the gradients.

        Gradients are those of the mean over the labels of all micro-batches of all data-parallel ranks. The model may
        be a ``context_model``.

        Returns:
            That mean, a scalar, the same on every rank.
        """

    def train_pipeline(
        self,
        sizes: Sizes,
        weights: dict[str, Tensor],
        batches: Sequence[Batch],
        groups: Groups,
        *,
        chunks: int = 1,
        with_norm: bool = False,
    ) -> tuple[Tensor | None, dict[str, Tensor], float]:
        """Run forward and backward of every micro-batch over the stages: 1F1B, interleaved if ``chunks`` is over 1.

        Gradients are those of the sum of all losses. The data-parallel group has one rank.

        Returns:
            The sum of the losses on the last stage, else None; the complete gradients of this rank's stage, whole, by
            the names of ``DenseModel``; and their norm over all stages if ``with_norm``, else 0. A tied weight is
            ``embedding.weight`` on both stages.
        """

    def lora(
        self,
        weight: Tensor,
        a: Tensor,
        b: Tensor,
        scaling: float,
        groups: Groups,
        *,
        kind: str,
        sequence_length: int | None,
    ) -> nn.Module:
        """Make a ``column`` or ``row`` linear layer of frozen weight ``[o, i]`` plus ``scaling * b a``.

        ``a`` is ``[r, i]`` and ``b`` is ``[o, r]``, both trained. Inputs and outputs as of the plain layers.
        """

    def merge(self, module: nn.Module) -> None:
        """Add the adapter's product to the weight, and leave the adapter out of later forwards."""

    def seed(self, seed: int, groups: Groups) -> None:
        """Seed every random stream of the library, as a program does at its start."""

    def dropout(self, tensor: Tensor, p: float, groups: Groups, *, split: bool) -> Tensor:
        """Drop elements of a tensor that ``groups.tp`` splits along dimension 0, or that every rank holds whole."""

    def recompute(self, function: Callable[..., Tensor], *args: Tensor) -> Tensor:
        """Call a function that may call ``dropout``, and call it again in the backward."""

    def initial(self, kind: str, rows: int, columns: int, groups: Groups) -> Tensor:
        """Draw the weight of a new ``column``, ``row`` or ``embedding`` layer, and return it whole.

        The draw is normal with standard deviation 1 for every kind, and from the streams of ``seed``.
        """

    def save(self, model: nn.Module, optimizer: Optimizer, folder: Path, groups: Groups) -> None:
        """Write a checkpoint of weights and optimizer state; collective over all ranks."""

    def load(self, model: nn.Module, optimizer: Optimizer, folder: Path, groups: Groups) -> None:
        """Read a checkpoint into a model and an optimizer of any layout; collective over all ranks."""
