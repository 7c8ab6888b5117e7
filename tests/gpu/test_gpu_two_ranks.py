"""Two ranks of gloo that share one GPU: a model split between them is the whole model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from test_gpu_attention_and_graphs import S, V, llama

from shardwise.nn.replicated import named_param_layouts, replicas_of


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("sequence_parallel", "overlap"),
    [(False, False), (True, False), (True, True)],
    ids=["", "sequence parallel", "overlapped"],
)
def test_a_split_model_is_the_whole_model(group, device, full, sequence_parallel, overlap):
    alone = [dist.new_group([rank]) for rank in range(2)][group.rank()]
    options = {"params_dtype": torch.float64, "num_query_groups": 2}
    torch.manual_seed(0)
    whole = llama(alone, device, full, **options)
    torch.manual_seed(0)
    split = llama(group, device, full, sequence_parallel=sequence_parallel, tp_comm_overlap=overlap, **options)
    torch.manual_seed(1)
    ids = torch.randint(V, (2, S), device=device)
    losses = []
    for model in (whole, split):
        loss = model(ids, labels=ids)
        loss.sum().backward()
        losses.append(loss.detach())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-11, atol=1e-12)
    dense = dict(whole.named_parameters())
    num_compared, replicas = 0, replicas_of(split)
    for name, param, layout in named_param_layouts(split, 2):
        expected = layout.take(dense[name].grad, group.rank())
        grad = param.grad
        if sequence_parallel and "tp" in replicas[param].summed_over:
            # A partial sum until the optimizer's step.
            grad = grad.cpu()
            dist.all_reduce(grad, group=group)
            grad = grad.to(device)
        torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")
        num_compared += 1
    assert num_compared > 10
