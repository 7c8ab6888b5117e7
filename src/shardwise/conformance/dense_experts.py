"""The dense mixture of experts that cases compare with: plain PyTorch, on one rank, every expert on every token."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter


@dataclass(frozen=True)
class ExpertSizes:
    """Sizes of a router and its experts, which have SwiGLU and no biases.

    Attributes:
        num, per_token, hidden, ffn: number of experts, number of a token's experts, and widths.
        scores: ``"softmax"`` over all experts, ``"sigmoid"`` of each logit, or ``"chosen"``: the highest logits are
            chosen, and the softmax is over these.
        normalizes: whether a token's weights are divided by their sum.
        scale: factor of the weights, also of those that are not normalized.
        groups, groups_per_token: experts are chosen from the best groups alone. A group's score is that of its best
            expert, with ``"sigmoid"`` the sum of its two best.
        shared: width of an additional MLP for all tokens, whose output is times a sigmoid of ``shared_scale``; None
            for none.
        aux_loss: coefficient of ``num * sum(f * p)``, the mean over sequences, with each expert's share ``f`` of the
            choices and its mean score ``p``.
        z_loss: coefficient of the mean square of the logits' logsumexp.
    """

    num: int = 4
    per_token: int = 2
    hidden: int = 6
    ffn: int = 10
    scores: str = "softmax"
    normalizes: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    shared: int | None = None
    aux_loss: float = 0.0
    z_loss: float = 0.0

    def but(self, **changes: Any) -> "ExpertSizes":
        """Return these sizes with changes."""
        return replace(self, **changes)


class DenseExperts(nn.Module):
    """The router and the experts. Weights are ``[out, in]``, and those of experts have their number in front.

    Attributes:
        router: ``[num, hidden]``.
        gate, up: ``[num, ffn, hidden]``.
        down: ``[num, hidden, ffn]``.
        shared_gate, shared_up: ``[shared, hidden]``, if there is a shared expert, as the next two.
        shared_down: ``[hidden, shared]``.
        shared_scale: ``[1, hidden]``.
    """

    router: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    shared_gate: Tensor
    shared_up: Tensor
    shared_down: Tensor
    shared_scale: Tensor

    def __init__(self, sizes: ExpertSizes) -> None:
        super().__init__()
        e, h, f, g = sizes.num, sizes.hidden, sizes.ffn, sizes.shared
        shapes: dict[str, tuple[int, ...]] = {"router": (e, h), "gate": (e, f, h), "up": (e, f, h), "down": (e, h, f)}
        if g is not None:
            shapes |= {"shared_gate": (g, h), "shared_up": (g, h), "shared_down": (h, g), "shared_scale": (1, h)}
        self.sizes = sizes
        for name, shape in shapes.items():
            self.register_parameter(name, Parameter(torch.randn(shape, dtype=torch.float64) * 0.7))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[s, b, h]`` to ``[s, b, h]``."""
        inner = F.silu(torch.einsum("sbh,efh->sbef", x, self.gate)) * torch.einsum("sbh,efh->sbef", x, self.up)
        outputs = torch.einsum("sbef,ehf->sbeh", inner, self.down)
        output = (outputs * self._weights(x).unsqueeze(-1)).sum(2)
        if self.sizes.shared is not None:
            shared = F.silu(F.linear(x, self.shared_gate)) * F.linear(x, self.shared_up)
            output = output + F.linear(x, self.shared_scale).sigmoid() * F.linear(shared, self.shared_down)
        return output

    def losses(self, x: Tensor) -> Tensor:
        """Return the auxiliary losses of ``[s, b, h]``, a scalar."""
        sizes, scores = self.sizes, self._scores(x)
        share = (self._chosen(x).double().mean(0) / sizes.per_token).detach()
        mean = (scores / scores.sum(-1, keepdim=True)).mean(0)
        balance = sizes.num * (share * mean).sum(-1).mean()
        return sizes.aux_loss * balance + sizes.z_loss * self._logits(x).logsumexp(-1).square().mean()

    def _logits(self, x: Tensor) -> Tensor:
        return F.linear(x, self.router)

    def _scores(self, x: Tensor) -> Tensor:
        logits = self._logits(x)
        return logits.sigmoid() if self.sizes.scores == "sigmoid" else logits.softmax(-1)

    def _chosen(self, x: Tensor) -> Tensor:
        """Return which experts each token has, ``[s, b, num]``."""
        sizes = self.sizes
        value = (self._logits(x) if sizes.scores == "chosen" else self._scores(x)).detach()
        of_groups = value.unflatten(-1, (sizes.groups, -1)).sort(-1, descending=True).values
        best = of_groups[..., : 2 if sizes.scores == "sigmoid" else 1].sum(-1)
        allowed = best >= best.sort(-1, descending=True).values[..., sizes.groups_per_token - 1, None]
        value = value.masked_fill(~allowed.repeat_interleave(sizes.num // sizes.groups, -1), -torch.inf)
        return value >= value.sort(-1, descending=True).values[..., sizes.per_token - 1, None]

    def _weights(self, x: Tensor) -> Tensor:
        """Return the weight of each expert for each token, 0 for one that it does not have, ``[s, b, num]``."""
        chosen = self._chosen(x)
        if self.sizes.scores == "chosen":
            weights = self._logits(x).masked_fill(~chosen, -torch.inf).softmax(-1)
        else:
            weights = self._scores(x) * chosen
        if self.sizes.normalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * self.sizes.scale
