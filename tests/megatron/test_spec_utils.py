"""A spec builds a module, whether its class is given or named."""

import functools

import pytest
import torch

from shardwise.core.errors import ConfigError
from shardwise.megatron.spec_utils import (
    IdentityFuncOp,
    IdentityOp,
    ModuleSpec,
    build_module,
    get_module,
    get_submodules,
    import_module,
)


class Part(torch.nn.Module):
    def __init__(self, width, *, scale=1.0, submodules=None):
        super().__init__()
        self.made_with = (width, scale, submodules)


@pytest.mark.parametrize("module", [Part, (__name__, "Part")], ids=["class", "name"])
def test_a_spec_builds(module):
    spec = ModuleSpec(module, params={"scale": 2.0}, submodules="parts", metainfo={"of": "the program"})
    assert get_module(spec).__name__ == "Part"
    assert build_module(spec, 3).made_with == spec(width=3).made_with == (3, 2.0, "parts")
    assert build_module(Part, 3, scale=4.0).made_with == (3, 4.0, None)
    assert get_submodules(spec) == get_submodules(functools.partial(Part, submodules="parts")) == "parts"


def test_a_function_is_returned():
    assert build_module(test_a_function_is_returned) is test_a_function_is_returned
    assert build_module(ModuleSpec(test_a_function_is_returned), 1) is test_a_function_is_returned


def test_what_builds_nothing_says_so():
    with pytest.raises(TypeError, match="scale") as info:
        build_module(ModuleSpec(Part, params={"scale": 2.0}), 3, scale=4.0)
    assert info.value.__notes__ == ["when a spec's Part was built"]
    with pytest.raises(ImportError, match=r"'Absent' of module .* no such name"):
        import_module((__name__, "Absent"))
    with pytest.raises(ConfigError, match="3 builds no module; give a class or a ModuleSpec"):
        build_module(3)
    with pytest.raises(ConfigError, match="has no submodules"):
        get_submodules(Part)


def test_parts_that_a_layer_does_not_have():
    x = torch.ones(2)
    assert IdentityOp("any", argument=1)(x, 5) is x
    assert IdentityFuncOp(3)(True, False)(x, None) is x
