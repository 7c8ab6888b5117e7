"""What could go wrong only on a GPU, on one that PyTorch is made to believe in."""

import threading
from functools import partial

import pytest
import torch
import torch.distributed as dist
from harness.model_options import LLAMA, NO_DROPOUT
from harness.on_pretended_gpu import StepRecorder, fake_tensors, join

from shardwise.core.communication.accounting import CollectiveCounter
from shardwise.core.sequence_view import SequenceView
from shardwise.megatron.config import TransformerConfig
from shardwise.megatron.models.gpt import GPTModel
from shardwise.megatron.process_groups_config import ProcessGroupCollection
from shardwise.megatron.schedules import get_forward_backward_func
from shardwise.models.transformer.layer import TransformerLayerSpec
from shardwise.nn import ColumnLinear
from shardwise.parallel_state import initialize_model_parallel


def llama(tp, **options):
    return TransformerConfig(
        num_layers=options.pop("num_layers", 4),
        hidden_size=4096,
        num_attention_heads=32,
        num_query_groups=8,
        ffn_hidden_size=14336,
        **LLAMA,
        **NO_DROPOUT,
        params_dtype=torch.bfloat16,
        perform_initialization=False,
        tensor_model_parallel_size=tp,
        **options,
    )


def a_large_step():
    t, num_layers, s, b, h, v = 8, 2, 4095, 2, 4096, 32003
    group = join("cuda:fake", world_size=t, rank=7)
    with fake_tensors(), StepRecorder() as making:
        model = GPTModel(
            llama(t, num_layers=num_layers, sequence_parallel=True),
            TransformerLayerSpec(),
            v,
            s,
            position_embedding_type="rope",
            pg_collection=ProcessGroupCollection(tp=group),
        )
        ids = torch.zeros(b, s, dtype=torch.int64, device="cuda")
        with CollectiveCounter() as forward, StepRecorder() as step:
            loss = model(ids, labels=ids)
        with CollectiveCounter() as backward, step:
            loss.mean().backward()
    # Attention, MLP and output layer gather, and attention, MLP and embedding reduce: bf16, of this rank, the last one.
    own, whole = s // t * b * h * 2, s * b * h * 2
    expected = {"all_gather": (2 * num_layers + 1) * own, "reduce_scatter": (2 * num_layers + 1) * whole}
    of_the_loss = s * b * 3 * 4
    found = [
        {name: sum(each.num_bytes for each in counter.launches if each.name == name) for name in expected}
        for counter in (forward, backward)
    ]
    large = [where for recorder in (making, step) for where in recorder.made if where[0] == "cpu" and len(where[2]) > 1]
    return found, expected, of_the_loss, step.copies, large


@pytest.mark.slow
def test_a_step_of_a_large_model_stays_on_the_gpu_and_is_counted_to_the_byte(pretended_gpu):
    (forward, backward), expected, of_the_loss, copies, large = pretended_gpu(a_large_step)
    assert copies == {}
    assert large == []
    assert forward == expected | {"all_gather": expected["all_gather"] + of_the_loss}
    # Gradients of gathers are reduce-scatters, and the other way round; and columns gather their inputs again.
    assert backward["reduce_scatter"] == expected["reduce_scatter"]
    assert backward["all_gather"] == 2 * expected["all_gather"]


def stages(rank):
    join("cuda:fake", world_size=2, rank=rank)
    initialize_model_parallel(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    b, s, num_micro_batches, calls = 1, 64, 4, []
    in_one = dist.batch_isend_irecv

    def noted(operations):
        calls.append([str(operation.tensor.device) for operation in operations])
        return in_one(operations)

    dist.batch_isend_irecv = noted
    with fake_tensors(), StepRecorder() as recorder:
        config = llama(
            1, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, pipeline_dtype=torch.bfloat16
        )
        chunks = [
            GPTModel(
                config,
                TransformerLayerSpec(),
                1000,
                s,
                pre_process=rank == 0 and chunk == 0,
                post_process=rank == 1 and chunk == 1,
                position_embedding_type="rope",
                vp_stage=chunk,
            )
            for chunk in range(2)
        ]
        ids = torch.zeros(b, s, dtype=torch.int64, device="cuda")

        def forward_step(iterator, model):
            return model(ids, labels=ids), lambda loss: (loss.mean(), {})

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(range(num_micro_batches))] * 2,
            model=chunks,
            num_microbatches=num_micro_batches,
            seq_length=s,
            micro_batch_size=b,
        )
    gradients = [param.grad is not None for chunk in chunks for param in chunk.parameters()]
    number = sum(recorder.operators[name] for name in ("c10d.send.default", "c10d.recv_.default"))
    return calls, number, all(gradients), len(gradients)


def test_stages_on_gpus_exchange_their_messages_in_common_calls(pretended_gpu):
    for rank in range(2):
        calls, number, all_there, num_gradients = pretended_gpu(stages, rank)
        assert all_there
        assert num_gradients > 10
        assert {device for call in calls for device in call} == {"cuda:0"}
        # Every message was in one of the calls, and some had two or more: what one rank sends another waits to send.
        assert number == sum(map(len, calls))
        assert max(map(len, calls)) > 1


def backwards_at_once():
    group = join("cuda:fake", world_size=2, rank=0)
    num_threads, rounds, failures, own = 3, 5, [], {}
    start, one_at_a_time = threading.Barrier(num_threads), threading.Lock()

    def train(index):
        try:
            start.wait()
            for _ in range(rounds):
                # Fake tensors are not made for several threads at once; counters are.
                with CollectiveCounter() as counter, one_at_a_time, fake_tensors(), StepRecorder():
                    layer = ColumnLinear(6 + index, 8, group=group, sequence_parallel=True, bias=False)
                    x = torch.ones(5 + 2 * index, 1, 6 + index, device="cuda", requires_grad=True)
                    layer(x, sequence=SequenceView(10 + 4 * index, group)).sum().backward()
                own.setdefault(index, []).append(counter.launches)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=partial(train, index)) for index in range(num_threads)]
    with CollectiveCounter() as counter:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    return counter.launches, own, rounds


def test_backward_passes_of_several_threads_are_counted_once_each(pretended_gpu):
    """One thread of autograd runs all backward passes of the GPU, whoever called them."""
    launches, own, rounds = pretended_gpu(backwards_at_once)
    for index, seen in own.items():
        shard = (5 + 2 * index) * (6 + index) * 4
        mine = [("all_gather", shard), ("all_gather", shard), ("reduce_scatter", 2 * shard)]
        for name, num_bytes in set(mine):
            count = sum((each.name, each.num_bytes) == (name, num_bytes) for each in launches)
            assert count == rounds * mine.count((name, num_bytes))
            # Its own counter has at least its own, and others' that ran meanwhile.
            assert all(
                sum((each.name, each.num_bytes) == (name, num_bytes) for each in once) == mine.count((name, num_bytes))
                for once in seen
            )
    assert len(launches) == 3 * 3 * rounds
