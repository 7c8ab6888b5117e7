"""Attention with split heads: grouped keys, norms of queries and keys, rotary positions."""

from typing import Any

from shardwise.conformance.case import case
from shardwise.conformance.dense import Sizes, backward_of_mean, batch, dense_model, gradients_of, weights_of
from shardwise.conformance.dense_checks import Reference, check_model
from shardwise.conformance.dense_comparison import assert_all_close, assert_close
from shardwise.core.topology import Groups


@case("NVIDIA/Megatron-LM, class of bug", "language_model", tp=2)
def heads_are_split(target: Any, groups: Groups) -> None:
    """With as many keys as queries, the split model has the dense loss and gradients."""
    check_model(target, groups, Sizes(kv_heads=4))


@case("bigcode-project/Megatron-LM#11", "language_model", tp=2)
def grouped_keys(target: Any, groups: Groups) -> None:
    """With two queries for each key, every rank's queries meet their own keys."""
    check_model(target, groups, Sizes(kv_heads=2))


@case("bigcode-project/Megatron-LM#37", "language_model", "few_kv_heads", tp=2)
def one_key_for_all_ranks(target: Any, groups: Groups) -> None:
    """One key-value head on two ranks: the gradients of its copies are summed."""
    check_model(target, groups, Sizes(kv_heads=1))


@case("huggingface/transformers#48307", "language_model", "few_kv_heads", tp=4)
def fewer_keys_than_ranks(target: Any, groups: Groups) -> None:
    """Two key-value heads on four ranks: each copy has the gradient of the whole head."""
    check_model(target, groups, Sizes(kv_heads=2))


@case("pytorch/torchtitan#2577", "language_model", "few_kv_heads", "uneven", tp=3)
def keys_that_do_not_divide(target: Any, groups: Groups) -> None:
    """Six queries and two keys on three ranks, where one rank needs both keys."""
    check_model(target, groups, Sizes(hidden=18, heads=6, kv_heads=2))


@case("huggingface/transformers, class of bug", "language_model", tp=2)
def query_and_key_norms(target: Any, groups: Groups) -> None:
    """The norms of queries and keys, which each rank applies to its heads, get the sum of the ranks' gradients."""
    check_model(target, groups, Sizes(qk_norm=True))


@case("huggingface/transformers, class of bug", "language_model", tp=2)
def query_and_key_norms_under_accumulation(target: Any, groups: Groups) -> None:
    """Their gradients are summed over the ranks once, also after two micro-batches."""
    sizes = Sizes(qk_norm=True)
    check_model(target, groups, sizes, batches=[batch(sizes) for _ in range(2)])


@case("huggingface/transformers, class of bug", "other_models", tp=2)
def query_and_key_norms_of_other_models(target: Any, groups: Groups) -> None:
    """In every model of the library with such norms, their gradients are those of the model on one rank."""
    for name, (whole, split) in target.other_models(groups).items():
        given = batch(Sizes())
        for model in (whole, split):
            model(*given).mean().backward()
        target.finalize_gradients(split, groups)
        expected = gradients_of(whole)
        kinds = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")
        norms = {
            key.removeprefix("inner."): value for key, value in expected.items() if any(kind in key for kind in kinds)
        }
        assert norms, f"{name} has no norms of queries and keys"
        assert_all_close(target.whole_gradients(split, groups), norms, f"the gradient, in {name},", target)


@case("NVIDIA/Megatron-LM#816", "language_model.sequence_parallel", tp=2)
def query_and_key_norms_with_sequence_parallelism(target: Any, groups: Groups) -> None:
    """The same holds with sequence parallelism, whose norms are summed too."""
    sizes = Sizes(qk_norm=True)
    check_model(target, groups, sizes, batches=[batch(sizes) for _ in range(2)], sequence_parallel=True)


@case("NVIDIA-NeMo/Speech#6178", "language_model.sequence_parallel", tp=2)
def rotary_positions_of_a_split_sequence(target: Any, groups: Groups) -> None:
    """Rotary positions count from the start of the whole sequence, also where a rank holds its second half."""
    sizes = Sizes(layers=1)
    dense, given = dense_model(sizes), batch(sizes, b=1, s=16)
    model = target.language_model(sizes, weights_of(dense), groups, sequence_parallel=True)
    assert_close(model(*given), dense(*given), "the loss", target)


@case("lightseekorg/tokenspeed#254", "language_model", "sinks", tp=2)
def sinks_are_those_of_the_own_heads(target: Any, groups: Groups) -> None:
    """Each rank's heads have their own sinks, and each sink has its gradient."""
    check_model(target, groups, Sizes(sinks=True))


@case("pie-project/pie#272", "language_model", "sinks", "windows", "few_kv_heads", tp=4)
def sinks_belong_to_queries(target: Any, groups: Groups) -> None:
    """Two key-value heads on four ranks, windows in one layer: each query head has one sink, in every layer."""
    check_model(target, groups, Sizes(kv_heads=2, sinks=True, window=3))


@case("NVIDIA-NeMo/RL#3716", "language_model", "optimizer", "few_kv_heads", tp=4)
def copies_stay_equal(target: Any, groups: Groups) -> None:
    """After two steps the copies of key-value heads and the norms of heads are those of the dense model."""
    sizes = Sizes(kv_heads=2, qk_norm=True)
    dense = dense_model(sizes)
    model = target.language_model(sizes, weights_of(dense), groups)
    reference = Reference(dense)
    optimizer = target.optimizer(model, groups)
    for _ in range(2):
        given = batch(sizes)
        backward_of_mean(dense, [given])
        reference.step()
        model(*given).mean().backward()
        target.finalize_gradients(model, groups)
        optimizer.step()
    assert_all_close(target.whole_parameters(model, groups), weights_of(dense), "the updated value", target)
