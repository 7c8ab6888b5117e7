"""Floating-point operations that a model needs, whatever a run computes beside them."""

from __future__ import annotations

from shardwise.run.plan.parameters import Part, parameters_of
from shardwise.storage.huggingface.description import ModelDescription

# Tables, of which a token reads a row.
_LOOKED_UP = ("embedding.position_embeddings.weight", "embedding.word_embeddings.weight")


def model_flops_per_token(model: ModelDescription, sequence_length: int, *, trains_weights: bool = True) -> int:
    """Of forward and backward, a multiplication and an addition being two.

    ``6 N + 12 l a d s``: ``N`` elements of the weight matrices that each token is multiplied by (embeddings are looked
    up, but for one that is the output layer too), ``l`` layers of ``a`` heads of width ``d``, ``s`` tokens. Attention
    counts as if each token saw all others. Recomputation does not count: a model that needs it is no larger.

    Args:
        model: a ``"gpt"``.
        sequence_length: ``s``.
        trains_weights: False where weights are frozen, as beneath adapters, whose own operations are left out: then
            ``4 N + 12 l a d s``.

    Source: Chowdhery et al. 2022 (arXiv:2204.02311), appendix B.
    """
    whole = Part(range(model.num_layers), is_first=True, is_last=True)
    is_output = model.share_embeddings_and_output_weights and model.classification is None
    looked_up = _LOOKED_UP[:1] if is_output else _LOOKED_UP
    multiplied = sum(
        param.numel
        for param in parameters_of(model, whole, tp=1, rank=0)
        if len(param.shape) == 2 and param.name not in looked_up
    )
    attention = 12 * model.num_layers * model.num_attention_heads * model.kv_channels * sequence_length
    return (6 if trains_weights else 4) * multiplied + attention
