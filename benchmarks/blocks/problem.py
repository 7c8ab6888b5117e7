"""The computation of every candidate: column-parallel linear, GELU or attention, row-parallel linear."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from shardwise.core.errors import ConfigError

BLOCKS = ("mlp", "attention")


@dataclass(frozen=True)
class BlockSizes:
    """Sizes of a block and its input.

    Attributes:
        hidden_size: width of input and output.
        ffn_hidden_size: width between the two linear layers of the MLP.
        num_heads: number of attention heads.
        sequence_length: tokens in a sample.
        batch_size: samples in a step.
        bias: whether the linear layers have biases.

    Raises:
        ConfigError: a size is out of range.
    """

    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    sequence_length: int
    batch_size: int
    bias: bool = True

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "bias" and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1")
        if self.hidden_size % self.num_heads != 0:
            raise ConfigError(f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}")

    def check_split(self, num_ranks: int) -> None:
        """Raise ConfigError unless the number of ranks divides all sizes that are split."""
        for name in ("num_heads", "ffn_hidden_size", "sequence_length"):
            if getattr(self, name) % num_ranks != 0:
                raise ConfigError(f"{name} {getattr(self, name)} is not a multiple of the {num_ranks} ranks")

    def column_size(self, block: str) -> int:
        """Width of the column-parallel layer's whole output."""
        return self.ffn_hidden_size if block == "mlp" else 3 * self.hidden_size

    def row_size(self, block: str) -> int:
        """Width of the row-parallel layer's whole input."""
        return self.ffn_hidden_size if block == "mlp" else self.hidden_size

    def between(self, block: str) -> Callable[[Tensor], Tensor]:
        """Return the function between the two layers; the same code in every candidate."""
        if block == "mlp":
            return F.gelu
        head_dim = self.hidden_size // self.num_heads

        def attend(mixed: Tensor) -> Tensor:
            s, b, _ = mixed.shape
            # Query, key and value are stored head by head, so that ranks hold whole heads.
            q, k, v = (x.permute(1, 2, 0, 3) for x in mixed.view(s, b, -1, 3, head_dim).unbind(3))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).reshape(s, b, -1)

        return attend


@dataclass(frozen=True)
class Problem:
    """The input of every candidate; bit for bit the same in every process.

    Attributes:
        block: ``"mlp"`` or ``"attention"``.
        sizes: sizes of the whole block.
        weights: whole weights, by the names of ``Block``.
        input_: input of the block, ``[s, b, h]``.
        incoming: gradient of the output, ``[s, b, h]``.
    """

    block: str
    sizes: BlockSizes
    weights: dict[str, Tensor]
    input_: Tensor
    incoming: Tensor

    @classmethod
    def draw(cls, block: str, sizes: BlockSizes, seed: int) -> Problem:
        """Draw random weights, input and gradient."""
        generator = torch.Generator().manual_seed(seed)
        h, o, i = sizes.hidden_size, sizes.column_size(block), sizes.row_size(block)
        weights = {
            "column.weight": torch.randn(o, h, generator=generator) * h**-0.5,
            "row.weight": torch.randn(h, i, generator=generator) * i**-0.5,
        }
        if sizes.bias:
            # Zero biases would hide a bias that is added twice.
            weights["column.bias"] = torch.randn(o, generator=generator)
            weights["row.bias"] = torch.randn(h, generator=generator)
        shape = (sizes.sequence_length, sizes.batch_size, h)
        return cls(
            block, sizes, weights, torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
        )


class Block(nn.Module):
    """``row(between(column(x)))``."""

    def __init__(self, column: nn.Module, between: Callable[[Tensor], Tensor], row: nn.Module) -> None:
        super().__init__()
        self.column = column
        self.between = between
        self.row = row

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[s, b, h]`` or ``[s/t, b, h]`` to the same shape."""
        output: Tensor = self.row(self.between(self.column(x)))
        return output


class Candidate:
    """One implementation of a block, with its input.

    Args:
        module: this rank's part of the block.
        problem: input of the block and gradient of its output.
        group: process group of the ranks that split the block.
        sequence_parallel: True if input and output are this rank's part of the sequence.
        partial: names of the parameters whose gradients are partial sums until the gradients of a step are finalised.
    """

    def __init__(
        self,
        module: nn.Module,
        problem: Problem,
        group: ProcessGroup,
        *,
        sequence_parallel: bool,
        partial: Collection[str] = (),
    ) -> None:
        self.module = module
        part = slice(group.rank(), group.rank() + 1) if sequence_parallel else slice(None)
        self.input_, self.incoming = (
            torch.cat(x.chunk(group.size())[part]) for x in (problem.input_, problem.incoming)
        )
        self.input_.requires_grad_()
        self._params: list[Parameter] = list(module.parameters())
        self._group = group
        self._partial = partial

    def step(self) -> Tensor:
        """Run forward and backward pass, and return the output.

        DTensor does not wait for the last collective of each pass. The layers around the block in a model would wait,
        so the step does too.
        """
        self.input_.grad = None
        for param in self._params:
            param.grad = None
        output: Tensor = self.module(self.input_)
        _wait(output)
        output.backward(self.incoming)
        _wait(self.input_.grad)
        return output

    def results(self) -> dict[str, Tensor]:
        """Return the output, the input gradient and this rank's shard of every weight gradient of one step."""
        output = self.step().detach().clone()
        assert self.input_.grad is not None
        results = {"output": output, "input gradient": self.input_.grad.clone()}
        for name, param in self.module.named_parameters():
            assert param.grad is not None
            gradient = param.grad
            if isinstance(gradient, DTensor):
                assert isinstance(param, DTensor)
                gradient = gradient.redistribute(placements=param.placements).to_local()
            gradient = gradient.clone()
            if name in self._partial:
                dist.all_reduce(gradient, group=self._group)
            results[f"gradient of {name}"] = gradient
        return results


def _wait(tensor: Tensor | None) -> None:
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor.wait()
