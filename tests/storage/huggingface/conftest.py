"""References by transformers, made once per session each."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist
from hf_references import Reference, add_padded_values, make_reference

from shardwise.core.topology import Groups
from shardwise.run.processes.ranks import open_ranks


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """A function from a name of ``MODELS`` to its reference."""
    root = tmp_path_factory.mktemp("references")
    made: dict[str, Reference] = {}

    def get(name: str) -> Reference:
        if name not in made:
            made[name] = make_reference(name, root)
        return made[name]

    return get


@pytest.fixture
def reference(request: pytest.FixtureRequest, make: Callable[[str], Reference]) -> Reference:
    """The reference that the test's parameter names."""
    return make(request.param)


@pytest.fixture
def padded(reference: Reference) -> Reference:
    """The same, with what it computes of a padded batch."""
    if not (reference.folder.parent / "padded.safetensors").exists():
        add_padded_values(reference)
    return reference


@pytest.fixture
def one_rank() -> Iterator[Groups]:
    """Groups of this process alone."""
    with open_ranks("cpu"):
        yield Groups(tp=dist.group.WORLD)
