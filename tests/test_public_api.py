"""What the engine's four public packages export, name by name; and each command's function has its flags."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import types
from pathlib import Path

import pytest
from harness.program import run as run_program

from shardwise.cli.main import COMMANDS
from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.run.settings import FinetuneSettings
from shardwise.training.bounds import from_keywords

EXPORTS = {
    "shardwise": "Groups Topology on_ranks parallelize",
    "shardwise.models": "Bert Experts GPT LatentAttention LayerConfig ModelConfig Recomputation",
    "shardwise.nn": (
        "Arithmetic ColumnLinear GroupModule HeadsRMSNorm LinearParallelism ReplicatedEmbedding ReplicatedLinear "
        "RowLinear ShardedModule VocabEmbedding add_and_norm arithmetic_of named_param_layouts parameter_device "
        "tensor_parallel_linear viewless"
    ),
    "shardwise.run": (
        "chat compare dpo evaluate evaluate_tasks export_hf export_megatron finetune fit_generation fit_run generate "
        "generate_many import_hf import_megatron plan_generation plan_run score tokenize train"
    ),
}
# Whose function is not named as the command, with the fields that are another function's.
FUNCTIONS = {
    "chat": ("chat", ()),
    "compare": ("compare", ()),
    "eval": ("evaluate", ("tasks", "task_path", "num_fewshot", "limit", "chat", "output", "also", "picture")),
    "export-hf": ("export_hf", ()),
    "export-megatron": ("export_megatron", ()),
    "generate": (
        "generate",
        ("prompts", "n", "json", "log_probs", "prompt_log_probs", "batch_size", "cache_tokens"),
    ),
    "score": ("score", ()),
    "import-hf": ("import_hf", ()),
    "import-megatron": ("import_megatron", ()),
    "tokenize": ("tokenize", ()),
}
LAUNCH = {"debug", "nproc", "tp", "pp"}


@pytest.mark.parametrize("module", EXPORTS)
def test_what_a_public_package_exports(module):
    package = importlib.import_module(module)
    offered = getattr(package, "__all__", None) or [
        name for name, value in vars(package).items() if name[0] != "_" and not isinstance(value, types.ModuleType)
    ]
    assert sorted(offered) == EXPORTS[module].split()
    for name in offered:
        value = getattr(package, name)
        assert not isinstance(value, types.ModuleType), f"{module}.{name} is a module"
        assert inspect.getdoc(value), f"{module}.{name} has no docstring"
    with pytest.raises(AttributeError, match="no_such_name"):
        package.no_such_name  # noqa: B018


def test_public_packages_above_torch_are_imported_without_it():
    code = "import sys, shardwise.models, shardwise.run; assert 'torch' not in sys.modules"
    run_program("-c", code)


def test_data_is_imported_without_models_and_what_they_import():
    run_program(
        "-c", "import sys, shardwise.data; assert not {'shardwise.models', 'torch._dynamo'} & sys.modules.keys()"
    )


# The import of torch._dynamo takes longer than that of PyTorch, and that of DTensor half as long.
IMPORTS = """
import sys
import shardwise.run.commands.text_generation, shardwise.run.commands.evaluate, shardwise.plan.plan
assert not {"torch.distributed.tensor", "torch._dynamo"} & sys.modules.keys()
import shardwise.run.run
assert "torch._dynamo" not in sys.modules
"""


def test_a_rank_does_not_import_what_it_does_not_use():
    run_program("-c", IMPORTS)


@pytest.mark.parametrize("command", FUNCTIONS)
def test_a_function_has_the_flags_of_its_command_with_their_defaults(command):
    name, others = FUNCTIONS[command]
    parameters = inspect.signature(getattr(importlib.import_module("shardwise.run"), name)).parameters
    arguments = getattr(
        importlib.import_module(f"shardwise.cli.{COMMANDS[command].module}"), COMMANDS[command].arguments
    )
    # Commands with stages pass their number on, as the function cannot tell it from that of the ranks.
    launch = LAUNCH - ({"pp"} if getattr(arguments, "has_stages", False) else set())
    fields = {each.name: each.default for each in dataclasses.fields(arguments) if each.name not in {*launch, *others}}
    assert fields
    callbacks = {"lines", "turns"} | {parameter for parameter in parameters if parameter.startswith("on_")}
    assert set(parameters) - callbacks == set(fields)
    for field, default in fields.items():
        # Several prompts are another function's.
        if field != "prompt" and parameters[field].default is not inspect.Parameter.empty:
            assert parameters[field].default == default, field


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("generate('nowhere', top_p=0.0)", r"^top_p is 0.0; it must be over 0 and at most 1"),
        ("generate('nowhere', device='gpu')", r"^device is 'gpu'; it must be one of 'auto', 'cpu', 'cuda'"),
        ("evaluate('nowhere', 'x.txt', batch_size=0)", r"^batch_size is 0"),
        ("train('x.txt', modell={})", r"^unknown setting modell; did you mean model\?"),
        (
            "train('x.txt', **{'model.num_layers': 2})",
            r"^model.num_layers is not one key; give the table model with the key",
        ),
        ("train('x.txt', parallel={'tp': 2})", r"^parallel.tp 2 does not divide the 1 ranks"),
        ("train(())", "^no text to train on"),
        ("fit_run('1GiB', ranks=[1, 'two'])", r"^ranks is 'two'; it must be an integer"),
    ],
)
def test_a_wrong_argument_is_refused_by_its_name(call, message):
    run = importlib.import_module("shardwise.run")
    with pytest.raises(ShardwiseError, match=message):
        eval(call, {name: getattr(run, name) for name in EXPORTS["shardwise.run"].split()})


def test_keywords_are_the_settings_of_flags_and_tables():
    given = {"base": Path("model"), "data": Path("a.jsonl"), "out": Path("out"), "lora_rank": 4, "epochs": 2.0}
    made = from_keywords(FinetuneSettings, given | {"training": {"global_batch_size": 2}, "samples": {"packing": True}})
    assert (made.base, made.data, made.out) == ("model", ("a.jsonl",), "out")
    assert (made.lora.lora_rank, made.samples.epochs, made.samples.packing) == (4, 2.0, True)
    assert made.training.global_batch_size == 2
    assert from_keywords(FinetuneSettings, given | {"data": ["a", Path("b")]}).data == ("a", "b")


@pytest.mark.ranks(2)
def test_a_process_in_a_group_is_told_to_leave_it(group):
    with pytest.raises(ConfigError, match="has joined a process group already"):
        importlib.import_module("shardwise.run").generate("nowhere", device="cpu")
    assert group.size() == 2
