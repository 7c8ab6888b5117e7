"""The dense mixture of experts that cases compare with: plain PyTorch, on one rank, every expert on every token."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter


@dataclass(frozen=True)
class ExpertSizes:
    """Sizes of a router and its experts.

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
        biases: whether the router's logits and both projections of each expert have biases.
        limit: None for SwiGLU. Otherwise the activation is ``(up + 1) * gate * sigmoid(1.702 * gate)`` (GPT-OSS), and
            this is the largest gate, and the largest magnitude of ``up``.
        choice_bias: whether a fixed bias is added to the scores for the choice of groups and experts alone.
        weighs_input: whether the weight multiplies an expert's input instead of its output.
        lora: rank of adapters of the router, of gate and up projection together, and of the down projection, whose
            products count twice; all else is then frozen. None for none.
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
    biases: bool = False
    limit: float | None = None
    choice_bias: bool = False
    weighs_input: bool = False
    lora: int | None = None
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
        router_bias: ``[num]``, with biases, as the next three.
        gate_bias, up_bias: ``[num, ffn]``.
        down_bias: ``[num, hidden]``.
        choice_bias: ``[num]``, a buffer.
        router_a, router_b: ``[lora, hidden]`` and ``[num, lora]``, with adapters, as the next ones.
        inner_a, inner_b: of gate and up projection, ``[num, lora, hidden]`` and ``[num, 2 * ffn, lora]``.
        outer_a, outer_b: of the down projection, ``[num, lora, ffn]`` and ``[num, hidden, lora]``.
    """

    router: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    shared_gate: Tensor
    shared_up: Tensor
    shared_down: Tensor
    shared_scale: Tensor
    router_bias: Tensor
    gate_bias: Tensor
    up_bias: Tensor
    down_bias: Tensor
    choice_bias: Tensor
    router_a: Tensor
    router_b: Tensor
    inner_a: Tensor
    inner_b: Tensor
    outer_a: Tensor
    outer_b: Tensor

    def __init__(self, sizes: ExpertSizes) -> None:
        super().__init__()
        e, h, f, g = sizes.num, sizes.hidden, sizes.ffn, sizes.shared
        shapes: dict[str, tuple[int, ...]] = {"router": (e, h), "gate": (e, f, h), "up": (e, f, h), "down": (e, h, f)}
        if g is not None:
            shapes |= {"shared_gate": (g, h), "shared_up": (g, h), "shared_down": (h, g), "shared_scale": (1, h)}
        if sizes.biases:
            shapes |= {"router_bias": (e,), "gate_bias": (e, f), "up_bias": (e, f), "down_bias": (e, h)}
        trained = list(shapes)
        if sizes.lora is not None:
            r = sizes.lora
            adapters = {"router_a": (r, h), "router_b": (e, r), "inner_a": (e, r, h), "inner_b": (e, 2 * f, r)}
            adapters |= {"outer_a": (e, r, f), "outer_b": (e, h, r)}
            shapes, trained = shapes | adapters, list(adapters)
        self.sizes = sizes
        for name, shape in shapes.items():
            value = torch.randn(shape, dtype=torch.float64) * 0.7
            self.register_parameter(name, Parameter(value, requires_grad=name in trained))
        if sizes.choice_bias:
            self.register_buffer("choice_bias", torch.randn(e) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[s, b, h]`` to ``[s, b, h]``."""
        weights = self._weights(x).unsqueeze(-1)
        given = x.unsqueeze(2).expand(-1, -1, self.sizes.num, -1)
        if self.sizes.weighs_input:
            given = given * weights
        gate, up = (torch.einsum("sbeh,efh->sbef", given, weight) for weight in self._inner().chunk(2, 1))
        if self.sizes.biases:
            gate, up = gate + self.gate_bias, up + self.up_bias
        outputs = torch.einsum("sbef,ehf->sbeh", self._activated(gate, up), self._outer())
        if self.sizes.biases:
            outputs = outputs + self.down_bias
        output = (outputs * (weights != 0 if self.sizes.weighs_input else weights)).sum(2)
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

    def _inner(self) -> Tensor:
        weight = torch.cat([self.gate, self.up], 1)
        return weight if self.sizes.lora is None else weight + 2 * self.inner_b @ self.inner_a

    def _outer(self) -> Tensor:
        return self.down if self.sizes.lora is None else self.down + 2 * self.outer_b @ self.outer_a

    def _activated(self, gate: Tensor, up: Tensor) -> Tensor:
        limit = self.sizes.limit
        if limit is None:
            return F.silu(gate) * up
        gate = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1) * gate * (1.702 * gate).sigmoid()

    def _logits(self, x: Tensor) -> Tensor:
        router = self.router if self.sizes.lora is None else self.router + 2 * self.router_b @ self.router_a
        return F.linear(x, router, self.router_bias if self.sizes.biases else None)

    def _scores(self, x: Tensor) -> Tensor:
        logits = self._logits(x)
        return logits.sigmoid() if self.sizes.scores == "sigmoid" else logits.softmax(-1)

    def _chosen(self, x: Tensor) -> Tensor:
        """Return which experts each token has, ``[s, b, num]``."""
        sizes = self.sizes
        value = (self._logits(x) if sizes.scores == "chosen" else self._scores(x)).detach()
        if sizes.choice_bias:
            value = value + self.choice_bias
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
