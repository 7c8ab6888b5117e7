import pytest
import torch
import torch.distributed as dist
from harness.launches import Launch, Launches, Stream, with_streams
from harness.on_pretended_gpu import fake_tensors, join


def launch(stream, seconds, *after):
    return Launch("aten.mm.default", stream, seconds, "", (), False, list(after))


@pytest.mark.parametrize(("num_queues", "starts"), [(1, [0, 0, 4, 4]), (8, [0, 0, 4, 1])])
def test_a_launch_that_waits_holds_up_its_queue(num_queues, starts):
    launches = Launches()
    product, gather = launch(0, 1), launch(1, 4)
    # The second gather waits for the first, which is on the same stream.
    launches.all = [product, gather, launch(1, 4), launch(0, 2)]
    assert [each.start for each in launches.run(num_queues)] == starts


def test_a_launch_waits_for_events_and_its_stream():
    launches = Launches()
    first, other = launch(0, 1), launch(2, 5)
    launches.all = [first, other, launch(0, 1, other), launch(0, 1)]
    assert [(each.start, each.end) for each in launches.run(8)] == [(0, 1), (0, 5), (5, 6), (6, 7)]
    assert other.during([first]) == 0.2


def recorded():
    join(world_size=2)
    with_streams()
    names = ("ones", "mm", "allreduce", "add", "mul")
    with fake_tensors(), Launches() as launches:
        x = torch.ones(4, 4, device="cuda")
        y = x @ x
        work = dist.all_reduce(y, async_op=True)
        x + x
        work.wait()
        y * 2
        side = Stream()
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            x - x
        torch.cuda.current_stream().wait_stream(side)
        x / 2
    assert all(name in each.name for name, each in zip(names, launches.all, strict=False))
    places = {id(each): place for place, each in enumerate(launches.all)}
    return [(each.stream, [places[id(other)] for other in each.after]) for each in launches.all]


@pytest.mark.slow
def test_what_is_recorded(pretended_gpu):
    ones, product, reduction, added, times, minus, divided = pretended_gpu(recorded)
    assert [each[1] for each in (ones, product, added)] == [[], [], []]
    # The collective waits for the product, the kernel after ``wait`` for the collective, and streams for each other.
    assert reduction[1] == [1]
    assert times[1] == [2]
    assert minus[1] == [4]
    assert divided[1] == [5]
    assert {each[0] for each in (ones, product, added, times, divided)} == {0}
    assert len({0, reduction[0], minus[0]}) == 3
