"""Mixtures of experts: the router, tokens that are sent to the ranks of their experts, and gradients of both."""

import functools
from typing import Any

import torch
from torch import Tensor

from shardwise.conformance.case import case
from shardwise.conformance.dense import gradients_of, weights_of
from shardwise.conformance.dense_checks import Reference, check_clipping, check_experts, check_resuming
from shardwise.conformance.dense_comparison import assert_all_close, assert_close, grad_of, numbers, part
from shardwise.conformance.dense_experts import DenseExperts, ExpertSizes
from shardwise.core.rank_grid import ParallelSizes
from shardwise.core.topology import Groups

_NEEDS = ("expert_layer", "whole_gradients")
_SEQUENCE = (*_NEEDS, "expert_layer.sequence_length")


def _own(whole: Tensor, target: Any, groups: Groups, *, splits: bool = False) -> Tensor:
    """Return this data-parallel rank's samples of ``[s, b, h]``, and of these its part of the sequence."""
    assert groups.dp is not None
    samples = whole.chunk(groups.dp.size(), 1)[groups.dp.rank()]
    return part(samples, 0, groups.tp, target) if splits else samples.clone()


def _check(
    target: Any,
    groups: Groups,
    sizes: ExpertSizes,
    *,
    s: int = 6,
    sequence_parallel: bool = False,
    negative: bool = False,
    largest: float = 1.0,
    recomputes: bool = False,
) -> tuple[Any, DenseExperts]:
    """Compare a layer with the dense one, with inputs times ``largest``; every logit may be negative."""
    assert groups.dp is not None
    dense = DenseExperts(sizes)
    x = numbers(s, 2 * groups.dp.size(), sizes.hidden, scale=largest)
    if negative:
        x = x.abs()
        with torch.no_grad():
            dense.router.copy_(-dense.router.abs())
    options = {"sequence_length": s} if sequence_parallel else {}
    own = functools.partial(_own, target=target, groups=groups, splits=sequence_parallel)
    return check_experts(target, groups, dense, x, own, recomputes=recomputes, **options)


@case("NVIDIA/Megatron-LM#5956", *_NEEDS, dp=4, ep=2)
def gradients_do_not_scale_with_ranks(target: Any, groups: Groups) -> None:
    """With two copies of experts on two ranks each, experts, router and input have the gradients of one rank."""
    _check(target, groups, ExpertSizes())


@case("NVIDIA-NeMo/Automodel#1260", *_SEQUENCE, tp=2, dp=2, ep=2)
def input_gradient_is_that_of_all_experts(target: Any, groups: Groups) -> None:
    """A token's gradient is the sum over its experts on all ranks, each of them split, with sequence parallelism."""
    _check(target, groups, ExpertSizes(per_token=3), sequence_parallel=True)


@case("pytorch/torchtitan#4054", *_NEEDS, tp=2)
def router_gradient_is_summed(target: Any, groups: Groups) -> None:
    """With experts that are split over two ranks, the router's and the input's gradients are those of whole ones."""
    _check(target, groups, ExpertSizes())


@case("pytorch/torchtitan#2387", *_NEEDS, tp=2, dp=2, etp=1)
def router_of_whole_experts_is_the_same(target: Any, groups: Groups) -> None:
    """With split layers and whole experts, the router's gradient is the sum over ranks, and the same on all."""
    _check(target, groups, ExpertSizes())


@case("NVIDIA/Megatron-LM#5916", *_NEEDS, dp=4, etp=2)
def experts_are_split_more_than_layers(target: Any, groups: Groups) -> None:
    """With whole layers and split experts, the ranks that hold the same part of an expert sum its gradients."""
    _check(target, groups, ExpertSizes())


@case("NVIDIA-NeMo/Automodel#2995", *_NEEDS, dp=2, ep=2)
def router_learns_through_the_exchange(target: Any, groups: Groups) -> None:
    """The weights of experts on other ranks give the router a gradient, also if the input needs none."""
    sizes = ExpertSizes()
    dense, x, grad = DenseExperts(sizes), numbers(6, 4, sizes.hidden), numbers(6, 4, sizes.hidden)
    dense(x).backward(grad)
    layer = target.expert_layer(sizes, weights_of(dense), groups)
    layer(_own(x, target, groups)).backward(_own(grad, target, groups))
    target.finalize_gradients(layer, groups)
    assert_all_close(target.whole_gradients(layer, groups), gradients_of(dense), "the gradient", target)


@case("NVIDIA-NeMo/Automodel#2995", "expert_layer", "optimizer", "whole_parameters", dp=2, ep=2)
def idle_experts_move_by_their_momentum(target: Any, groups: Groups) -> None:
    """Experts of a rank that gets no token have a gradient of zero, not none, and no rank waits."""
    sizes = ExpertSizes()
    dense = DenseExperts(sizes)
    with torch.no_grad():
        # The first feature decides: positive ones go to the experts of the first rank.
        dense.router[:, 0] = torch.tensor([9.0, 9.0, -9.0, -9.0])
    layer = target.expert_layer(sizes, weights_of(dense), groups)
    optimizer = target.optimizer(layer, groups)
    reference = Reference(dense)
    for first in (torch.tensor([2.0, -2.0, 2.0, -2.0]), torch.tensor(2.0)):
        x, grad = numbers(6, 4, sizes.hidden), numbers(6, 4, sizes.hidden)
        x[..., 0] = first
        dense(x).backward(grad)
        reference.step()
        layer(_own(x, target, groups)).backward(_own(grad, target, groups))
        target.finalize_gradients(layer, groups)
        optimizer.step()
    assert_all_close(target.whole_parameters(layer, groups), weights_of(dense), "the value", target)


@case("pytorch/torchtitan#3193", *_NEEDS, "uneven", tp=2, dp=2, ep=4, etp=1)
def uneven_numbers_of_tokens(target: Any, groups: Groups) -> None:
    """One data-parallel rank has one token for two ranks, and another has seven; all are used once."""
    assert groups.dp is not None
    sizes, rank = ExpertSizes(), groups.dp.rank()
    x = numbers(8, 1, sizes.hidden)
    check_experts(target, groups, DenseExperts(sizes), x, lambda whole: whole.split([1, 7])[rank])


@case("deepspeedai/DeepSpeed#8475", *_NEEDS, "clip", tp=2, dp=2, ep=2, etp=1)
def norm_counts_each_expert_once(target: Any, groups: Groups) -> None:
    """The norm has every expert once, whichever ranks hold it, and all ranks clip by the same factor."""
    check_clipping(target, groups, *_check(target, groups, ExpertSizes()))


@case("NVIDIA/Megatron-LM#5047", *_SEQUENCE, tp=2, dp=2)
def balance_does_not_depend_on_the_ranks(target: Any, groups: Groups) -> None:
    """Auxiliary losses have the gradient of their mean over all sequences, with and without sequence parallelism."""
    for sequence_parallel in (False, True):
        _check(target, groups, ExpertSizes(aux_loss=3.0, z_loss=0.5), sequence_parallel=sequence_parallel)


@case("NVIDIA-NeMo/Megatron-Bridge#5470", *_SEQUENCE, "uneven_sequence", tp=2)
def balance_counts_no_padding(target: Any, groups: Groups) -> None:
    """A sequence of 7 on two ranks counts as 7 tokens in the auxiliary losses, not as 8."""
    _check(target, groups, ExpertSizes(aux_loss=3.0, z_loss=0.5), s=7, sequence_parallel=True)


@case("pytorch/torchtitan#1448", *_NEEDS, dp=2, ep=2)
def weights_are_normalized_or_not(target: Any, groups: Groups) -> None:
    """Weights are divided by their sum if that is asked for, and only then; their factor holds in both cases."""
    for normalizes in (True, False):
        for scores in ("softmax", "sigmoid"):
            _check(target, groups, ExpertSizes(scores=scores, normalizes=normalizes, scale=2.5))


@case("deepseek-ai/DeepSeek-V3#741", *_NEEDS, dp=2, ep=2)
def experts_are_of_the_allowed_groups(target: Any, groups: Groups) -> None:
    """No expert of another group is chosen, also where all logits of the allowed groups are negative."""
    sizes = ExpertSizes(num=8, groups=4, groups_per_token=2, per_token=3)
    _check(target, groups, sizes.but(scores="sigmoid"))
    _check(target, groups, sizes.but(scores="chosen"), negative=True)


@case("vllm-project/vllm#14027", "expert_layer", dp=2, ep=2)
def router_of_bf16_weights_computes_in_fp32(target: Any, groups: Groups) -> None:
    """Logits that are equal in bf16 and differ in fp32 choose the expert that fp32 chooses."""
    sizes = ExpertSizes(per_token=1, normalizes=False)
    dense = DenseExperts(sizes)
    x = numbers(6, 4, sizes.hidden)
    with torch.no_grad():
        # Logits are 1 + e / 2048, or 1 - e / 2048, for expert e, and a step of bf16 at 1 is 16 / 2048, or 8 / 2048.
        dense.router.zero_()
        dense.router[:, 0], dense.router[:, 1] = 1.0, torch.arange(4.0)
        x[..., 0], x[..., 1] = 1.0, torch.tensor([1.0, -1.0]).repeat(2) / 2048
        for param in dense.parameters():
            param.copy_(param.bfloat16())
    x = x.bfloat16().double()
    layer = target.expert_layer(sizes, {k: each.bfloat16() for k, each in weights_of(dense).items()}, groups)
    output = layer(_own(x, target, groups).bfloat16()).detach().double()
    expected = _own(dense(x).detach(), target, groups)
    # The experts themselves round to bf16; another expert's output is as far away as the output is large.
    wrong = float((output - expected).norm() / expected.norm())
    assert wrong < 0.05, f"the output differs by {wrong:.0%}: other experts than fp32's computed it"


@case("alibaba/Pai-Megatron-Patch#397", *_SEQUENCE, tp=2, ep=2, etp=1)
def shared_expert_sees_all_tokens_once(target: Any, groups: Groups) -> None:
    """The gradient of the shared expert's gate is summed over the parts of the sequence, and nothing counts twice."""
    for sequence_parallel in (False, True):
        _check(target, groups, ExpertSizes(shared=8), sequence_parallel=sequence_parallel)


@case("pytorch/torchtitan#4245", *_NEEDS, tp=2)
def biases_are_added_once(target: Any, groups: Groups) -> None:
    """Where two ranks split an expert, the bias of its down projection is added by one of them, or by halves."""
    _check(target, groups, ExpertSizes(biases=True))


@case("pytorch/torchtitan#4332", *_NEEDS, dp=4, ep=2, etp=2)
def biases_have_their_gradients(target: Any, groups: Groups) -> None:
    """Gradients of biases do not depend on how many ranks split an expert, and how many share the experts."""
    _check(target, groups, ExpertSizes(biases=True, limit=2.0))


@case("NVIDIA-NeMo/Automodel#2591", *_NEEDS, dp=2, ep=2)
def biases_are_weighted(target: Any, groups: Groups) -> None:
    """The router's weight multiplies an expert's last bias too."""
    _check(target, groups, ExpertSizes(biases=True, per_token=3, scores="chosen", normalizes=False))


@case("sgl-project/sglang#39939", *_NEEDS, "uneven", tp=2)
def gates_are_clamped(target: Any, groups: Groups) -> None:
    """The gate has an upper bound alone, the up projection two, and 1 is added to it; also far beyond the bounds."""
    _check(target, groups, ExpertSizes(ffn=9, limit=1.5), largest=3.0)


@case("NVIDIA-NeMo/Automodel#1324", *_NEEDS, "uneven", dp=4, ep=2, etp=2)
def gates_meet_their_up_projections(target: Any, groups: Groups) -> None:
    """A width of 9 on two ranks: each rank has the gate and the up projection of the same inner features."""
    _check(target, groups, ExpertSizes(ffn=9))


@case("huggingface/transformers#39581", *_NEEDS, dp=2, ep=2)
def choice_bias_is_not_in_the_weights(target: Any, groups: Groups) -> None:
    """The bias of the choice changes which experts a token has, and not their weights."""
    for scores in ("softmax", "sigmoid"):
        _check(target, groups, ExpertSizes(scores=scores, choice_bias=True))


@case("vllm-project/vllm#13474", *_NEEDS, dp=2, ep=2)
def choice_bias_ranks_the_groups(target: Any, groups: Groups) -> None:
    """The score of a group is the sum of the two best of its experts, each with its bias."""
    sizes = ExpertSizes(num=12, groups=4, groups_per_token=2, per_token=3)
    _check(target, groups, sizes.but(scores="sigmoid", choice_bias=True))


@case("NVIDIA/Megatron-LM#1378", *_NEEDS, dp=2, ep=2)
def softmax_groups_have_the_score_of_their_best(target: Any, groups: Groups) -> None:
    """With softmax the best expert of a group is its score, and with sigmoid the two best (DeepSeek V2 and V3)."""
    sizes = ExpertSizes(num=12, groups=4, groups_per_token=1, per_token=2)
    for scores in ("softmax", "sigmoid"):
        _check(target, groups, sizes.but(scores=scores))


@case("vllm-project/vllm#45037", *_NEEDS, tp=2, ep=2, etp=1)
def factor_multiplies_routed_experts_once(target: Any, groups: Groups) -> None:
    """The factor of the weights is in the sum of the routed experts once, and not in the shared expert."""
    for normalizes in (True, False):
        _check(target, groups, ExpertSizes(shared=8, scale=2.5, scores="sigmoid", normalizes=normalizes))


@case("vllm-project/vllm#43694", *_NEEDS, dp=2, ep=2)
def weights_of_inputs_count_once(target: Any, groups: Groups) -> None:
    """A weight that multiplies an expert's input does not multiply its output (Llama 4)."""
    _check(target, groups, ExpertSizes(scores="sigmoid", normalizes=False, weighs_input=True))


@case("NVIDIA/Megatron-LM#3768", *_NEEDS, "expert_layer.micro_batches", tp=2, dp=2)
def balance_does_not_depend_on_micro_batches(target: Any, groups: Groups) -> None:
    """Auxiliary losses of three micro-batches have the gradient of their mean over all sequences."""
    assert groups.dp is not None
    sizes = ExpertSizes(aux_loss=3.0, z_loss=0.5)
    dense = DenseExperts(sizes)
    x = numbers(6, 3 * groups.dp.size(), sizes.hidden)
    dense.losses(x).backward()
    layer = target.expert_layer(sizes, weights_of(dense), groups, micro_batches=3)
    for each in _own(x, target, groups).split(1, 1):
        output = layer(each)
        output.backward(torch.zeros_like(output))
    target.finalize_gradients(layer, groups)
    router = target.whole_gradients(layer, groups)["router"]
    assert_close(router, grad_of(dense.router), "the gradient of router", target)


@case("NVIDIA-NeMo/Automodel#3140", *_NEEDS, "recompute", tp=2, dp=2, ep=2, etp=1)
def recomputation_chooses_the_same_experts(target: Any, groups: Groups) -> None:
    """If the backward calls the layer again, all tokens go to the same experts, and auxiliary losses count once."""
    _check(target, groups, ExpertSizes(aux_loss=3.0, z_loss=0.5), recomputes=True)


@case("NVIDIA-NeMo/Megatron-Bridge#5634", *_NEEDS, tp=2)
def adapters_of_split_experts(target: Any, groups: Groups) -> None:
    """Adapters of experts that two ranks split, and of the router, have the dense output and gradients."""
    _check(target, groups, ExpertSizes(lora=3))


@case("NVIDIA-NeMo/Megatron-Bridge#5484", *_NEEDS, dp=4, ep=2)
def adapters_are_those_of_each_expert(target: Any, groups: Groups) -> None:
    """Each expert has its own adapter, however many ranks share the experts."""
    _check(target, groups, ExpertSizes(lora=2, per_token=3))


@case("KempnerInstitute/KempnerForge#202", "expert_layer", "optimizer", "whole_parameters", "save", "load", dp=2, ep=2)
def checkpoint_has_the_experts_of_all_ranks(target: Any, groups: Groups) -> None:
    """A checkpoint of experts on two ranks continues with whole experts, and with split ones, as one rank would."""
    sizes = ExpertSizes()
    dense = DenseExperts(sizes)
    start = weights_of(dense)
    reference = Reference(dense)
    xs, grads = ([numbers(6, 4, sizes.hidden) for _ in range(3)] for _ in range(2))
    for x, grad in zip(xs, grads, strict=True):
        dense(x).backward(grad)
        reference.step()

    def make(weights: dict[str, Tensor], at: Groups) -> Any:
        return target.expert_layer(sizes, weights, at)

    def step(layer: Any, optimizer: Any, number: int, at: Groups) -> None:
        layer(_own(xs[number], target, at)).backward(_own(grads[number], target, at))
        target.finalize_gradients(layer, at)
        optimizer.step()

    check_resuming(target, groups, make, step, start, weights_of(dense), [ParallelSizes(etp=1), ParallelSizes(etp=2)])
