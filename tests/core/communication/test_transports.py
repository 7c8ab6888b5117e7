"""One function chooses how a call travels."""

import ast
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.core.communication.collectives import all_reduce
from shardwise.core.communication.context import context_of
from shardwise.core.communication.transports import choose_transport, torch_distributed, transport_name
from shardwise.core.communication.transports.shared_memory import channel_of, close_channel

SOURCES = Path(shardwise.__file__).parent
CPU = torch.device("cpu")


@pytest.mark.ranks(2)
def test_a_transport_is_chosen_by_tensor_group_and_operation(group, monkeypatch):
    shared = channel_of(group) or torch_distributed
    assert (transport_name(group, CPU) == "shared memory") == (shared is not torch_distributed)
    numbers, flags = torch.ones(2), torch.tensor([True])
    for operation in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        assert choose_transport(operation, numbers, group) is shared
        assert choose_transport(operation, torch.ones(2, dtype=torch.complex64), group) is torch_distributed
        assert choose_transport(operation, numbers.to("meta"), group) is torch_distributed
    assert choose_transport("all_gather", flags, group) is shared
    assert choose_transport("reduce_scatter", flags, group) is torch_distributed
    assert choose_transport("all_reduce", numbers, group, dist.ReduceOp.MAX) is shared
    assert choose_transport("all_reduce", numbers, group, dist.ReduceOp.PRODUCT) is torch_distributed
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert choose_transport("all_reduce", numbers, group) is torch_distributed.Traced


def test_only_the_choice_knows_the_transports():
    """Whoever else asked would choose for itself."""
    found = []
    for path in SOURCES.rglob("*.py"):
        if "transports" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else set()
            if names & {"traced", "channel_of", "SharedMemory"}:
                found.append((path.name, names))
    # For the type of a group's memory.
    assert found == [("context.py", {"SharedMemory"})]


@pytest.mark.ranks(2)
def test_a_closed_channel_is_opened_again(group):
    own = dist.new_group([0, 1])
    opened = channel_of(own)
    close_channel(own)
    assert context_of(own).channel is None
    assert all_reduce(torch.ones(1), group=own).item() == 2
    assert (context_of(own).channel is None) == (opened is None)
    assert opened is None or context_of(own).channel is not opened


@pytest.mark.ranks(2)
def test_compiled_reductions_are_those_of_their_operation(group):
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        own = torch.tensor([2.0 + group.rank(), 3.0])
        expected = all_reduce(own, group=group, op=op)
        # Dynamo does not guard an operation.
        torch.compiler.reset()
        reduced = torch.compile(lambda x, op=op: all_reduce(x, group=group, op=op), backend="eager", fullgraph=True)
        assert torch.equal(reduced(own), expected), op
