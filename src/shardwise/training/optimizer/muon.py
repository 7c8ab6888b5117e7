"""Muon: orthogonalized momentum for the weight matrices of transformer layers, AdamW for all other parameters.

The update of a matrix depends on the whole matrix, so it cannot be computed shard by shard. The matrices are
distributed over the ranks that split them: the tensor-parallel group, or for an expert those that split it. Each rank
sends its shards of a matrix to the matrix's rank, and gets back its shards of the update. Each update is computed once,
and is the same at every layout.

Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"
(https://kellerjordan.github.io/posts/muon); the scale of an update is from Liu et al. 2025 (arXiv:2502.16982).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise.core.communication.collectives import all_to_all
from shardwise.core.sharding import ParamLayout
from shardwise.training.gradients import Division
from shardwise.training.optimizer.adamw import AdamW
from shardwise.training.optimizer.matrices import Matrix, weights_of

# Coefficients of x -> a x + b (x x^T) x + c (x x^T)^2 x, chosen so that five steps bring singular values near 1; Jordan
# et al. 2024.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5
# Approximate root mean square of AdamW's updates; Liu et al. 2025, section 2.2.
_ROOT_MEAN_SQUARE = 0.2
# Elements of whole matrices that each rank computes at once.
_ELEMENTS_AT_ONCE = 1 << 24


def orthogonalized(matrix: Tensor, num_steps: int = _STEPS) -> Tensor:
    """Return ``matrix``, ``[m, n]``, with singular values near 1, by steps of a Newton-Schulz iteration.

    After five steps, singular values over a thousandth of the matrix's norm are between about 0.7 and 1.2. Zeros stay
    zero.
    """
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if is_tall else matrix
    # One thread sums each row, so that the number of threads does not change the bits.
    norm = torch.linalg.vector_norm(
        torch.linalg.vector_norm(x, dim=1, dtype=torch.promote_types(x.dtype, torch.float32))
    )
    x = x / (norm + torch.finfo(norm.dtype).tiny).to(x.dtype)
    a, b, c = _COEFFICIENTS
    for _ in range(num_steps):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def with_momentum(gradient: Tensor, mean: Tensor, momentum: float) -> Tensor:
    """Add the gradient to the running ``mean`` in place; return the gradient with Nesterov momentum."""
    return gradient.lerp(mean.lerp_(gradient, 1 - momentum), momentum)


def update_(param: Tensor, move: Tensor, *, rate: float, weight_decay: float) -> None:
    """Decay ``param`` and subtract ``rate * move``, in place; ``move`` is overwritten."""
    # Use two operations: in 16 bits, ``sub_`` with a factor rounds the last elements of a tensor differently.
    param.mul_(1 - rate * weight_decay).sub_(move.mul_(rate))


def matrix_shapes(model: nn.Module) -> set[tuple[int, ...]]:
    """Return the shapes of the whole matrices whose updates are orthogonalized."""
    return {matrix.layout.global_shape for weight in weights_of(model) for matrix in weight.matrices}


def product_dtype(params_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of matrix products: the parameters' dtype, or fp32 for fp16."""
    return torch.float32 if params_dtype == torch.float16 else params_dtype


class Muon:
    """Muon for weights of linear layers and experts in transformer layers; AdamW for all other parameters.

    An ``[m, n]`` weight changes by ``-lr * (0.2 * sqrt(max(m, n)) * O + weight_decay * weight)``, where ``O`` is the
    ``orthogonalized`` gradient with Nesterov momentum. The factor gives updates the root mean square of AdamW's, so
    that one learning rate and one weight decay suit both. Queries, keys and values of a fused weight are three
    matrices, gate and up projection two, also those of each expert.

    Products are computed in the dtype of the model's parameters (fp32 for fp16), even after ``train_instead_``. If
    parameters are divided between data-parallel ranks, the matrices are distributed over these ranks too: each sends
    its elements of a gradient to the matrix's rank, and gets back its elements of the update.

    Args:
        model: the model whose parameters are trained.
        learning_rate: initial learning rate; ``set_learning_rate_`` changes it before each step.
        weight_decay: weight decay per unit of learning rate, also for AdamW.
        momentum: decay of the running mean of the gradient.
        matrix_learning_rate_ratio: learning rate of the matrices, divided by AdamW's.
        betas, epsilon: as for ``AdamW``.
        adamw: makes the AdamW of all other parameters.

    Raises:
        ConfigError: the model has latent attention.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        learning_rate: float,
        weight_decay: float,
        momentum: float,
        matrix_learning_rate_ratio: float,
        betas: tuple[float, float],
        epsilon: float,
        adamw: Callable[..., AdamW] = AdamW,
    ) -> None:
        self._parts: dict[Parameter, list[Matrix]] = {}
        self._momenta: dict[Parameter, Tensor] = {}
        self._local_shapes: dict[Parameter, torch.Size] = {}
        self._shares: Mapping[Parameter, Division] = {}
        self._groups: dict[Parameter, ProcessGroup | None] = {}
        for param, group, matrices in weights_of(model):
            self._parts[param], self._groups[param] = matrices, group
            self._local_shapes[param] = param.shape
        first = next(iter(self._parts), None)
        self._dtype = torch.float32 if first is None else product_dtype(first.dtype)
        self._adamw = adamw(
            model,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            betas=betas,
            epsilon=epsilon,
            without=self._parts,
        )
        self._own: dict[str, Any] = {
            "params": list(self._parts),
            "lr": learning_rate,
            "ratio": matrix_learning_rate_ratio,
            "momentum": momentum,
            "weight_decay": weight_decay,
        }
        self.param_groups: list[dict[str, Any]] = [*self._adamw.param_groups, self._own]
        self.why_not_fused: str | None = "Muon multiplies matrices one by one"

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._adamw.zero_grad(set_to_none)
        for param in self._parts:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter in place from its gradient; called on every rank that holds a part of it."""
        self._adamw.step()
        rate = self._own["lr"] * self._own["ratio"]
        for params in self._runs():
            means = [(param.grad, self._momentum_of(param)) for param in params if param.grad is not None]
            own = [with_momentum(*each, self._own["momentum"]).to(self._dtype).reshape(-1) for each in means]
            sizes = [self._sizes_of_shares(param) for param in params]
            shapes = [self._parts[param][0].layout.global_shape for param in params]
            dp_group = self._ranks_of(params[0])[1]
            distribution = MuonDistribution(sizes, distribute_matrices(shapes, len(sizes[0])), dp_group)
            gradients = {
                index: pieces[0] if len(pieces) == 1 else torch.cat(pieces)
                for index, pieces in distribution.collect(own).items()
            }
            moves = {
                index: move.reshape(-1).split(list(sizes[index]))
                for index, move in self._moves(params, gradients).items()
            }
            for param, move in zip(params, distribution.return_updates(moves, like=params[0]), strict=True):
                update_(param, move.view_as(param), rate=rate, weight_decay=self._own["weight_decay"])

    def _moves(self, params: Sequence[Parameter], gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Compute the updates of weights per unit of learning rate, by index in ``params``.

        ``gradients`` has the gradients, with momentum, of some weights: this tensor-parallel rank's part, flattened.
        """
        parts: list[tuple[int, Matrix]] = []
        shards: list[Tensor] = []
        for index, flat in gradients.items():
            gradient = flat.view(self._local_shapes[params[index]])
            for part in self._parts[params[index]]:
                parts.append((index, part))
                shards.append(torch.cat(part.views(gradient), part.dim))
        moves = {index: params[index].new_zeros(self._local_shapes[params[index]]) for index in gradients}
        updates = _orthogonalized([part for _, part in parts], shards, self._groups[params[0]])
        for (index, part), update in zip(parts, updates, strict=True):
            factor = _ROOT_MEAN_SQUARE * math.sqrt(max(part.layout.global_shape))
            lengths = [length for _, length in part.runs]
            for view, piece in zip(part.views(moves[index]), update.split(lengths, part.dim), strict=True):
                view.copy_(piece).mul_(factor)
        return moves

    def state_of(self, param: Parameter, layout: ParamLayout) -> Mapping[str, tuple[Tensor, ParamLayout]]:
        """Return the running mean of a matrix's gradient, ``"momentum"``, or AdamW's state of other parameters."""
        if param not in self._parts:
            return self._adamw.state_of(param, layout)
        return {"momentum": (self._momentum_of(param), layout)}

    def set_step_(self, step: int) -> None:
        self._adamw.set_step_(step)

    def train_instead_(
        self, copies: Mapping[Parameter, Parameter], shares: Mapping[Parameter, Division] | None = None
    ) -> None:
        for group in self.param_groups:
            group["params"] = [copies.get(param, param) for param in group["params"]]
        self._parts = {copies.get(param, param): parts for param, parts in self._parts.items()}
        self._local_shapes = {copies.get(param, param): shape for param, shape in self._local_shapes.items()}
        self._groups = {copies.get(param, param): group for param, group in self._groups.items()}
        shares = self._shares if shares is None else shares
        self._shares = {copies.get(param, param): share for param, share in shares.items()}

    def _momentum_of(self, param: Parameter) -> Tensor:
        if param not in self._momenta:
            self._momenta[param] = torch.zeros_like(param)
        return self._momenta[param]

    def _runs(self) -> Iterator[list[Parameter]]:
        """Yield all weights that have a gradient, as many at a time as the memory for whole matrices allows.

        Weights of a run have the same ranks.
        """
        for ranks in dict.fromkeys(map(self._ranks_of, self._parts)):
            run: list[Parameter] = []
            elements, most = 0, _ELEMENTS_AT_ONCE * math.prod(group.size() for group in ranks if group is not None)
            for param in self._parts:
                if param.grad is None or self._ranks_of(param) != ranks:
                    continue
                run.append(param)
                elements += sum(math.prod(part.layout.global_shape) for part in self._parts[param])
                if elements >= most:
                    yield run
                    run, elements = [], 0
            if run:
                yield run

    def _ranks_of(self, param: Parameter) -> tuple[ProcessGroup | None, ProcessGroup | None]:
        """Return the ranks that split the matrices of a weight, and those that have its elements."""
        share = self._shares.get(param)
        return self._groups[param], None if share is None else share.group

    def _sizes_of_shares(self, param: Parameter) -> tuple[int, ...]:
        """Return the number of elements of a weight on each data-parallel rank that holds some."""
        share = self._shares.get(param)
        return (param.numel(),) if share is None else tuple(stop - start for start, stop in share.intervals)


def _orthogonalized(parts: Sequence[Matrix], shards: Sequence[Tensor], group: ProcessGroup | None) -> list[Tensor]:
    """Return this rank's shards of the orthogonalized matrices, from its shards of the matrices."""
    if group is None or group.size() == 1 or not shards:
        return [orthogonalized(shard) for shard in shards]
    ranks = range(group.size())
    sizes = [[math.prod(part.layout.local_shape(other)) for other in ranks] for part in parts]
    distribution = MuonDistribution(
        sizes, distribute_matrices([part.layout.global_shape for part in parts], len(ranks)), group
    )
    wholes: dict[int, list[Tensor]] = {}
    for index, pieces in distribution.collect([shard.reshape(-1) for shard in shards]).items():
        layout = parts[index].layout
        whole = layout.assemble([piece.view(layout.local_shape(other)) for other, piece in enumerate(pieces)])
        whole = orthogonalized(whole)
        wholes[index] = [layout.take(whole, other) for other in ranks]
    updates = distribution.return_updates(wholes, like=shards[0])
    return [update.view_as(shard) for update, shard in zip(updates, shards, strict=True)]


def distribute_matrices(shapes: Sequence[tuple[int, ...]], num_ranks: int) -> list[list[int]]:
    """Assign matrices to ranks, the most expensive matrix first, always to the rank with the least work."""
    work = [math.prod(shape) * min(shape) for shape in shapes]
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    for index in sorted(range(len(work)), key=lambda index: -work[index]):
        min(dealt, key=lambda indices: sum(work[k] for k in indices)).append(index)
    return dealt


class MuonDistribution:
    """Collects the pieces of several tensors on one rank each, and returns updates, each by an all-to-all.

    Args:
        sizes: for each tensor, the number of elements of each rank's piece.
        dealt: for each rank, the indices of the tensors that it collects; the same on every rank.
        group: the ranks; None if there is only one.
    """

    def __init__(
        self, sizes: Sequence[Sequence[int]], dealt: Sequence[Sequence[int]], group: ProcessGroup | None
    ) -> None:
        self._sizes, self._dealt = sizes, dealt
        self._group = None if group is None or group.size() == 1 else group
        rank = 0 if group is None else group.rank()
        self._own = dealt[rank]
        self._order = [index for indices in dealt for index in indices]
        # Elements sent to each rank for its tensors, and received from each rank for this rank's tensors.
        self._sent = [sum(sizes[index][rank] for index in indices) for indices in dealt]
        self._received = [sum(sizes[index][other] for index in self._own) for other in range(len(dealt))]
        self._pieces = [sizes[index][rank] for index in self._order]

    def collect(self, pieces: Sequence[Tensor]) -> dict[int, list[Tensor]]:
        """Return all pieces of this rank's tensors: by the tensor's index, one piece of each rank, in rank order.

        ``pieces`` has this rank's piece of every tensor, flattened.
        """
        if self._group is None:
            return {index: [pieces[index]] for index in self._own}
        flat = _joined([pieces[index] for index in self._order], like=pieces[0])
        flat = all_to_all(flat, group=self._group, input_sizes=self._sent, output_sizes=self._received)
        runs = [
            run.split([self._sizes[index][other] for index in self._own])
            for other, run in enumerate(flat.split(self._received))
        ]
        return {index: [run[place] for run in runs] for place, index in enumerate(self._own)}

    def return_updates(self, wholes: Mapping[int, Sequence[Tensor]], like: Tensor) -> list[Tensor]:
        """Return this rank's piece of every tensor, flattened, with ``like``'s dtype and device.

        ``wholes`` has the pieces for all ranks of this rank's tensors, by the tensor's index.
        """
        if self._group is None:
            return [wholes[index][0] for index in range(len(self._sizes))]
        flat = _joined([wholes[index][other] for other in range(len(self._dealt)) for index in self._own], like=like)
        flat = all_to_all(flat, group=self._group, input_sizes=self._received, output_sizes=self._sent)
        by_index = dict(zip(self._order, flat.split(self._pieces), strict=True))
        return [by_index[index] for index in range(len(self._sizes))]


def _joined(pieces: Sequence[Tensor], like: Tensor) -> Tensor:
    # A rank may have nothing to send.
    return torch.cat([like.new_empty(0), *(piece.reshape(-1) for piece in pieces)])
