"""Latent attention: what all heads share, the narrow values, and the factor of the scores."""

from typing import Any

from shardwise.conformance.case import case
from shardwise.conformance.dense import Sizes, batch
from shardwise.conformance.dense_checks import check_model
from shardwise.conformance.dense_latent import Latent, Yarn
from shardwise.core.topology import Groups

_NEEDS = ("language_model", "latent_attention")
_SIZES = Sizes(kv_heads=4, latent=Latent(rank=5, rotated=4, value=3))


@case("NVIDIA/Megatron-LM#1699", *_NEEDS, tp=2)
def shared_key_has_the_gradient_of_all_heads(target: Any, groups: Groups) -> None:
    """The rotated part of a key, which all heads share, gets the sum of the gradients of the heads of all ranks."""
    check_model(target, groups, _SIZES)


@case("inclusionAI/AReno#496", *_NEEDS, tp=2)
def latents_have_their_gradients_once(target: Any, groups: Groups) -> None:
    """Projections to latents and their norms, which every rank holds whole, get each gradient once."""
    sizes = _SIZES.but(latent=Latent(rank=5, rotated=4, value=3, query_rank=7))
    check_model(target, groups, sizes, batches=[batch(sizes) for _ in range(2)])


@case("NVIDIA/Megatron-LM#6839", *_NEEDS, "language_model.sequence_parallel", tp=2)
def latents_of_parts_of_the_sequence(target: Any, groups: Groups) -> None:
    """The same holds with sequence parallelism, where each rank computes the latents of its part."""
    for query_rank in (None, 7):
        sizes = _SIZES.but(latent=Latent(rank=5, rotated=4, value=3, query_rank=query_rank))
        check_model(target, groups, sizes, batches=[batch(sizes) for _ in range(2)], sequence_parallel=True)


@case("NVIDIA/TransformerEngine#2629", *_NEEDS, tp=2)
def values_have_another_width(target: Any, groups: Groups) -> None:
    """Values that are narrower or wider than keys give the dense loss and gradients."""
    for value in (2, 11):
        check_model(target, groups, _SIZES.but(latent=Latent(rank=5, rotated=4, value=value)))


@case("NVIDIA/Megatron-LM#1429", *_NEEDS, tp=2)
def score_factor_is_that_of_all_dims(target: Any, groups: Groups) -> None:
    """With YaRN the factor of the scores comes from mscale_all_dim, and not from mscale."""
    check_model(target, groups, _SIZES.but(yarn=Yarn(4.0, 8, mscale=0.6, mscale_all_dim=1.5)))


@case("onnxruntime/mobius#548", *_NEEDS, tp=2)
def score_factor_holds_without_one_of_the_rotation(target: Any, groups: Groups) -> None:
    """If mscale and mscale_all_dim are equal, cosine and sine have no factor, and the scores have theirs."""
    check_model(target, groups, _SIZES.but(yarn=Yarn(4.0, 8, mscale=0.7, mscale_all_dim=0.7)))
