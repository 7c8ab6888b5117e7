"""Whole comparisons with the dense computation that several cases make."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.conformance.dense import Batch, Sizes, backward_of_mean, batch, dense_model, gradients_of, weights_of
from shardwise.conformance.dense_comparison import (
    assert_all_close,
    assert_close,
    assert_same_on_ranks,
    grad_of,
    numbers,
    part,
    summed,
)
from shardwise.conformance.dense_experts import DenseExperts
from shardwise.core.rank_grid import ParallelSizes
from shardwise.core.topology import Groups, Topology


class Reference:
    """AdamW of a dense model, with the settings of the targets' optimizers."""

    def __init__(self, dense: nn.Module) -> None:
        options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
        self.optimizer = torch.optim.AdamW(dense.parameters(), **options, foreach=False)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def own_part(target: Any, groups: Groups, dim: int) -> Callable[[Tensor], Tensor]:
    """Return the function from a whole tensor to this tensor-parallel rank's part."""
    return lambda whole: part(whole, dim, groups.tp, target)


def whole_of(tensor: Tensor) -> Tensor:
    """The part of a rank that has everything."""
    return tensor


def check_layer(
    target: Any,
    groups: Groups,
    layer: Any,
    dense: Callable[..., Tensor],
    params: dict[str, Tensor],
    batches: Sequence[tuple[Tensor, Tensor]],
    *,
    into: Callable[[Tensor], Tensor] = whole_of,
    out_of: Callable[[Tensor], Tensor] = whole_of,
    frozen: bool = False,
) -> dict[str, Tensor]:
    """Compare a layer with ``dense(x, **params)`` for inputs with gradients of their outputs; return its gradients.

    ``into`` and ``out_of`` take this rank's part of an input and of an output. A frozen layer has no gradients.
    """
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    if frozen:
        layer.requires_grad_(False)
    for x, grad in batches:
        whole = x.clone().requires_grad_()
        expected = dense(whole, **leaves)
        expected.backward(grad)
        given = into(x).clone().requires_grad_()
        output = layer(given)
        assert_close(output, out_of(expected), "the output", target)
        output.backward(out_of(grad).clone())
        assert_close(grad_of(given), into(grad_of(whole)), "the gradient of the input", target)
    if frozen:
        return {}
    target.finalize_gradients(layer, groups)
    gradients: dict[str, Tensor] = target.whole_gradients(layer, groups)
    assert_all_close(gradients, {name: grad_of(leaf) for name, leaf in leaves.items()}, "the gradient", target)
    return gradients


def check_experts(
    target: Any,
    groups: Groups,
    dense: DenseExperts,
    x: Tensor,
    own: Callable[[Tensor], Tensor],
    *,
    recomputes: bool = False,
    **options: int,
) -> tuple[Any, DenseExperts]:
    """Compare output, input gradient and all gradients with the dense layer; return both layers.

    ``own`` takes this rank's part of ``x``, and ``recomputes`` lets the backward call the layer again.
    """
    grad, leaf = numbers(*x.shape), x.clone().requires_grad_()
    expected = dense(leaf)
    ((expected * grad).sum() + dense.losses(leaf)).backward()
    layer = target.expert_layer(dense.sizes, weights_of(dense), groups, **options)
    given = own(x).clone().requires_grad_()
    output = target.recompute(layer, given) if recomputes else layer(given)
    assert_close(output, own(expected), "the output", target)
    output.backward(own(grad))
    assert_close(grad_of(given), own(grad_of(leaf)), "the gradient of the input", target)
    target.finalize_gradients(layer, groups)
    assert_all_close(target.whole_gradients(layer, groups), gradients_of(dense), "the gradient", target)
    return layer, dense


def check_model(
    target: Any, groups: Groups, sizes: Sizes, *, batches: Sequence[Batch] = (), **options: bool
) -> tuple[Any, nn.Module]:
    """Compare the loss and all gradients with the dense model, on one batch or on these; return both models."""
    dense = dense_model(sizes)
    batches = batches or [batch(sizes)]
    model = target.language_model(sizes, weights_of(dense), groups, **options)
    expected = backward_of_mean(dense, batches)
    total = torch.zeros((), dtype=torch.float64)
    for ids, labels in batches:
        loss = model(ids, labels).mean() / len(batches)
        loss.backward()
        total = total + loss.detach()
    assert_close(total, expected, "the loss", target)
    target.finalize_gradients(model, groups)
    assert_all_close(target.whole_gradients(model, groups), gradients_of(dense), "the gradient", target)
    return model, dense


def check_steps(
    target: Any, groups: Groups, make: Callable[..., Any], sizes: Sizes, *, s: int = 8
) -> tuple[Any, nn.Module]:
    """Compare parameters after steps of AdamW with split state; return the optimizer and the dense model."""
    assert groups.dp is not None
    dense = dense_model(sizes)
    model, reference = make(sizes, weights_of(dense), groups), Reference(dense)
    optimizer = target.optimizer(model, groups, split_state=True)
    rank, num_ranks = groups.data.samples
    for _ in range(3):
        batches = [batch(sizes, s=s) for _ in range(num_ranks)]
        backward_of_mean(dense, batches)
        reference.step()
        target.accumulate(model, [batches[rank]], groups)
        optimizer.step()
    whole = target.whole_parameters(model, groups)
    assert_all_close(whole, weights_of(dense), "the updated value", target)
    for name, value in whole.items():
        assert_same_on_ranks(value, name, groups.dp)
    return optimizer, dense


def check_state_is_split(groups: Groups, optimizer: Any, dense: nn.Module) -> None:
    """Check that the ranks keep each running mean of AdamW once, and none much more than its share."""
    assert groups.dp is not None
    kept, every = optimizer.num_state_elements(), 2 * sum(each.numel() for each in dense.parameters())
    total = int(summed(torch.tensor(kept), groups.dp))
    assert total == every, f"the ranks keep {total} elements of state together and must keep {every}"
    share = 4 / 3 * every / groups.dp.size()
    assert kept <= share, f"this rank keeps {kept} of {every} elements of state and must keep at most {share:.0f}"


def norm_of(dense: nn.Module) -> float:
    """Return the norm of all gradients of a dense model."""
    return float(torch.cat([each.flatten() for each in gradients_of(dense).values()]).norm())


def assert_norm(actual: float, expected: float, what: str, target: Any) -> None:
    assert_close(torch.tensor(actual, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64), what, target)


def check_clipping(target: Any, groups: Groups, model: Any, dense: nn.Module) -> None:
    """Clip complete gradients to a third of their norm, and compare both with the dense model's."""
    norm = norm_of(dense)
    assert_norm(target.clip(model, norm / 3, groups), norm, "the norm before clipping", target)
    factor = (norm / 3) / (norm + 1e-6)
    expected = {name: grad * factor for name, grad in gradients_of(dense).items()}
    assert_all_close(target.whole_gradients(model, groups), expected, "the clipped gradient", target)


def check_resuming(
    target: Any,
    groups: Groups,
    make: Callable[[dict[str, Tensor], Groups], Any],
    step: Callable[[Any, Any, int, Groups], None],
    start: dict[str, Tensor],
    expected: dict[str, Tensor],
    layouts: Sequence[ParallelSizes],
    **options: bool,
) -> None:
    """Take two steps, save, load at other layouts, and take the third; compare the parameters with ``expected``."""
    paths: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(paths)
    folder = Path(paths[0])
    model = make(start, groups)
    optimizer = target.optimizer(model, groups, **options)
    for number in range(2):
        step(model, optimizer, number, groups)
    target.save(model, optimizer, folder, groups)
    for sizes in layouts:
        topology = Topology.create(sizes)
        try:
            other = Groups.of(topology)
            # Other weights, so that loading nothing shows.
            loaded = make({name: value + 1 for name, value in start.items()}, other)
            its_optimizer = target.optimizer(loaded, other, **options)
            target.load(loaded, its_optimizer, folder, other)
            step(loaded, its_optimizer, 2, other)
            what = f"the value after loading at tp {sizes.tp}, etp {sizes.etp or sizes.tp}"
            assert_all_close(target.whole_parameters(loaded, other), expected, what, target)
        finally:
            topology.destroy()
