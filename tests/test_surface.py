"""The public surface, both ways: nothing of it is missing, and nothing is public that is not documented.

``signatures.json`` lists what programs written for the reference call: module, name, parameters in order.
"""

import importlib
import inspect
import json
import re
from pathlib import Path

import pytest

SIGNATURES = json.loads((Path(__file__).parent / "signatures.json").read_text())
GUIDE = (Path(__file__).parents[1] / "docs" / "porting.md").read_text()
# An issue of its own.
LATER = ("shardwise.tensor_parallel.inference_layers",)
LATER_NAMES = ("InferenceLayerNormColumnParallelLinear", "InferenceRowParallelLinear")

NAMES = [
    (module, name, parameters)
    for module, names in SIGNATURES.items()
    if module not in LATER
    for name, parameters in names.items()
    if name not in LATER_NAMES
]
MODULES = sorted({module for module, _, _ in NAMES})
MODELS = ("shardwise.megatron.models.bert", "shardwise.megatron.models.embedding", "shardwise.megatron.models.gpt")


def found(module, name):
    value = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize(("module", "name", "parameters"), NAMES, ids=[f"{m}.{n}" for m, n, _ in NAMES])
def test_nothing_is_missing(module, name, parameters):
    value = found(module, name)
    assert value.__doc__, "a public name needs a docstring"
    if parameters is None:
        return
    ours = [
        parameter for parameter in inspect.signature(value).parameters.values() if parameter.name not in ("self", "cls")
    ]
    # More may follow, if programs need not give them.
    assert [parameter.name for parameter in ours if parameter.kind is not parameter.VAR_POSITIONAL][
        : len(parameters)
    ] == parameters
    for parameter in ours[len(parameters) :]:
        assert parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or (
            parameter.default is not parameter.empty
        ), f"{parameter.name} is new and required"


@pytest.mark.parametrize(
    "module",
    [
        *MODULES,
        *MODELS,
        "shardwise.megatron.process_groups_config",
        "shardwise.megatron.config",
        "shardwise.megatron.utils",
    ],
)
def test_nothing_public_is_undocumented(module):
    """What a module defines without an underscore is in ``__all__``; what is in ``__all__`` is in the guide."""
    imported = importlib.import_module(module)
    offered = set(imported.__all__)
    defined = {
        name
        for name, value in vars(imported).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module
    }
    assert defined <= offered
    documented = set(re.findall(r"`(\w+)", GUIDE))
    assert offered <= documented, f"docs/porting.md does not mention {sorted(offered - documented)}"
    for name in offered:
        value = getattr(imported, name)
        if inspect.isfunction(value) or inspect.isclass(value):
            assert inspect.getdoc(value), f"{name} has no docstring"


def test_the_guide_names_nothing_that_is_not_there():
    """Every name in the first column of the guide's tables is in the module that its heading names."""
    missing = []
    for section in GUIDE.split("\n## ")[1:]:
        heading = re.match(r"`([\w.]+)`", section)
        if heading is None:
            continue
        imported = importlib.import_module(f"shardwise.{heading.group(1)}")
        rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
        names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
        missing += [f"{heading.group(1)}.{name}" for name in names if not hasattr(imported, name)]
    assert missing == []
