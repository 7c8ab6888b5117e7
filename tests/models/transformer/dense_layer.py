"""The oracle: one dense transformer layer in plain PyTorch, which shares no code with the library.

It reads whole weights under the library's names, and computes head by head with explicit matrix products.
"""

from __future__ import annotations

import math

import torch

LOCAL = {
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "squared_relu": lambda x: torch.where(x > 0, x * x, torch.zeros_like(x)),
    "relu": lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
    "silu": lambda x: x / (1 + torch.exp(-x)),
}


def norm(config, weights, name, x, epsilon=None):
    if name + "weight" not in weights:
        return x
    epsilon = epsilon or config.layernorm_epsilon
    weight = weights[name + "weight"] + (1 if config.layernorm_zero_centered_gamma else 0)
    if config.normalization == "RMSNorm":
        return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight + weights[name + "bias"]


def linear(weights, name, x):
    y = x @ weights[name + "weight"].T
    return y + weights[name + "bias"] if name + "bias" in weights else y


def rotate(x, positions, share, interleaved):
    """``[s, b, d]`` at ``[b, s]`` positions."""
    rotated = int(x.shape[-1] * share)
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + rotated // 2) for i in range(rotated // 2)]
    columns = list(x.unbind(-1))
    for i, (first, second) in enumerate(pairs):
        angle = positions.T.double() * 10000.0 ** (-2 * i / rotated)
        a, b = columns[first], columns[second]
        columns[first], columns[second] = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
    return torch.stack(columns, -1)


def allowed(config, s, b, causal, forbidden, documents):
    """``[b, s, s]``, pair by pair."""
    before, after = config.window_size or (-1, -1)
    result = torch.zeros(b, s, s, dtype=torch.bool)
    for row in range(b):
        for i in range(s):
            for j in range(s):
                sees = not causal or j <= i
                sees &= before < 0 or j >= i - before
                sees &= after < 0 or causal or j <= i + after
                sees &= documents is None or bool(documents[row, i] == documents[row, j])
                sees &= forbidden is None or not bool(forbidden.expand(b, 1, s, s)[row, 0, i, j])
                result[row, i, j] = sees
    return result


def heads_of(config, weights, x, rotated):
    """Query, key and value of each head."""
    heads, groups, d = config.heads
    mixed = linear(weights, "self_attention.linear_qkv.", x)
    per_group = heads // groups
    for head in range(heads):
        block = mixed[..., head // per_group * (per_group + 2) * d :][..., : (per_group + 2) * d]
        query = block[..., head % per_group * d :][..., :d]
        key, value = block[..., per_group * d :][..., :d], block[..., (per_group + 1) * d :]
        query = norm(config, weights, "self_attention.q_layernorm.", query)
        key = norm(config, weights, "self_attention.k_layernorm.", key)
        yield rotated(query), rotated(key), value


def latent_heads_of(config, weights, x, rotated):
    """The same of latent attention."""
    latent, plain = config.latent, config.latent.plain_width
    of_queries = x
    if latent.query_rank is not None:
        of_queries = linear(weights, "self_attention.linear_q_down_proj.", x)
        of_queries = norm(config, weights, "self_attention.q_layernorm.", of_queries, 1e-6)
    up = "linear_q_proj." if latent.query_rank is None else "linear_q_up_proj."
    queries = linear(weights, "self_attention." + up, of_queries)
    of_keys = linear(weights, "self_attention.linear_kv_down_proj.", x)
    shared = rotated(of_keys[..., latent.key_value_rank :])
    of_keys = norm(config, weights, "self_attention.kv_layernorm.", of_keys[..., : latent.key_value_rank], 1e-6)
    mixed = linear(weights, "self_attention.linear_kv_up_proj.", of_keys)
    for head in range(config.num_attention_heads):
        query = queries[..., head * latent.head_width :][..., : latent.head_width]
        block = mixed[..., head * (plain + latent.value_width) :][..., : plain + latent.value_width]
        query = torch.cat([query[..., :plain], rotated(query[..., plain:])], -1)
        yield query, torch.cat([block[..., :plain], shared], -1), block[..., plain:]


def attention(config, weights, x, sees, *, positions, share, slopes):
    s = x.shape[0]
    d = config.heads.width
    scale = config.softmax_scale or d**-0.5
    distance = (torch.arange(s)[:, None] - torch.arange(s)).abs().double()

    def rotated(x):
        return rotate(x, positions, share, config.rotary_interleaved) if share else x

    contexts = []
    split = heads_of if config.latent is None else latent_heads_of
    for head, (query, key, value) in enumerate(split(config, weights, x, rotated)):
        scores = torch.einsum("qbd,kbd->bqk", query, key) * scale
        if slopes:
            scores = scores - slopes[head] * distance
        # Not the whole row, which would be NaN where a token sees nothing.
        exponentials = torch.where(sees, scores - scores.detach().amax(-1, keepdim=True), -torch.inf).exp()
        total = exponentials.sum(-1, keepdim=True)
        if config.attention_sinks:
            largest = scores.detach().amax(-1, keepdim=True)
            total = total + (weights["self_attention.sinks.logits"][head] - largest).exp()
        weighting = exponentials / total.clamp(min=1e-300)
        contexts.append(torch.einsum("bqk,kbd->qbd", weighting, value))
    return linear(weights, "self_attention.linear_proj.", torch.cat(contexts, -1))


def mlp(config, weights, x, activation):
    y = linear(weights, "mlp.linear_fc1.", x)
    if config.gated_linear_unit:
        gate, up = y.chunk(2, -1)
        y = LOCAL[activation](gate) * up
    else:
        y = LOCAL[activation](y)
    return linear(weights, "mlp.linear_fc2.", y)


def dense_layer(
    config,
    weights,
    x,
    *,
    causal=True,
    forbidden=None,
    documents=None,
    positions=None,
    share=0.0,
    slopes=None,
    activation,
):
    """``[s, b, h]`` to the same."""
    s, b, _ = x.shape
    sees = allowed(config, s, b, causal, forbidden, documents)
    positions = torch.arange(s).expand(b, s) if positions is None else positions
    halves = (
        ("input_layernorm.", "post_self_attn_layernorm.", True),
        ("pre_mlp_layernorm.", "post_mlp_layernorm.", False),
    )
    for before, after, is_attention in halves:
        y = norm(config, weights, before, x)
        residual = y if config.apply_residual_connection_post_layernorm else x
        if is_attention:
            y = attention(config, weights, y, sees, positions=positions, share=share, slopes=slopes)
        else:
            y = mlp(config, weights, y, activation)
        x = norm(config, weights, after, residual + y)
    return x
