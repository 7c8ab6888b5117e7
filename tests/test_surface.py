"""The public surface, both ways: nothing of it is missing, and nothing is public that is not documented.

``signatures.json`` lists what programs written for Megatron call: module, name, parameters in order. DEFAULTS has
what they leave out.
"""

import ast
import importlib
import inspect
import json
import re
import sys
from pathlib import Path

import pytest
import torch

import shardwise.megatron
from shardwise.core import errors
from shardwise.megatron.absent import ABSENT

SIGNATURES = json.loads((Path(__file__).parent / "signatures.json").read_text())
DOCS = Path(__file__).parents[1] / "docs"
# The page with the modules that are not offered comes last.
GUIDE = "\n".join(
    (DOCS / f"{page}.md").read_text() for page in ("porting_tensor_parallel", "porting_models", "porting")
)

NAMES = [(module, name, parameters) for module, names in SIGNATURES.items() for name, parameters in names.items()]
MODULES = sorted({module for module, _, _ in NAMES})
MODELS = ("shardwise.megatron.models.bert", "shardwise.megatron.models.embedding", "shardwise.megatron.models.gpt")


# Of each name the parameters that have a default, with Megatron's; "*" comes before those by keyword alone.
DEFAULTS = {
    "tensor_parallel.cross_entropy": {"vocab_parallel_cross_entropy": "label_smoothing=0.0, tp_group=None"},
    "tensor_parallel.data": {"broadcast_data": "tp_group=None"},
    "tensor_parallel.layers": {
        "VocabParallelEmbedding": "*, reduce_scatter_embeddings=False, tp_group=None, pg_collection=None",
        "ColumnParallelLinear": (
            "*, bias=True, gather_output=False, stride=1, keep_master_weight_for_test=False, skip_bias_add=False, "
            "skip_weight_param_allocation=False, embedding_activation_buffer=None, grad_output_buffer=None, "
            "is_expert=False, tp_comm_buffer_name=None, disable_grad_reduce=False, tp_group=None, name=None, "
            "output_dtype=None, pg_collection=None"
        ),
        "ColumnParallelLinear.forward": "weight=None, runtime_gather_output=None",
        "RowParallelLinear": (
            "*, stride=1, keep_master_weight_for_test=False, is_expert=False, tp_comm_buffer_name=None, tp_group=None, "
            "name=None, pg_collection=None"
        ),
        "linear_with_grad_accumulation_and_async_allreduce": (
            "grad_output_buffer=None, wgrad_deferral_limit=0, async_grad_allreduce=None, tp_group=None"
        ),
        "linear_with_frozen_weight": "grad_output_buffer=None, wgrad_deferral_limit=None, async_grad_allreduce=None",
        "param_is_not_tensor_parallel_duplicate": "tp_group=None",
    },
    "tensor_parallel.mappings": {
        "copy_to_tensor_model_parallel_region": "group=None",
        "reduce_from_tensor_model_parallel_region": "group=None",
        "scatter_to_tensor_model_parallel_region": "group=None",
        "gather_from_tensor_model_parallel_region": "group=None",
        "scatter_to_sequence_parallel_region": "group=None",
        "gather_from_sequence_parallel_region": (
            "tensor_parallel_output_grad=True, group=None, output_split_sizes=None, use_global_buffer=False"
        ),
        "reduce_scatter_to_sequence_parallel_region": "group=None, input_split_sizes=None, use_global_buffer=False",
        "all_gather_last_dim_from_tensor_parallel_region": "group=None",
        "reduce_scatter_last_dim_to_tensor_parallel_region": "group=None",
        "all_to_all": "output_split_sizes_=None, input_split_sizes=None, use_nccl_stream=False",
        "all_to_all_sp2hp": "group=None",
        "all_to_all_hp2sp": "group=None",
    },
    "tensor_parallel.random": {
        "CheckpointWithoutOutput": "fp8=False",
        "model_parallel_cuda_manual_seed": (
            "te_rng_tracker=False, inference_rng_tracker=False, use_cudagraphable_rng=False, tp_rank=None, "
            "ep_rank=None, etp_rank=None, force_reset_rng=False"
        ),
    },
    "tensor_parallel.utils": {
        "split_tensor_along_last_dim": "contiguous_split_chunks=False",
        "split_tensor_into_1d_equal_chunks": "new_buffer=False, tp_group=None",
        "gather_split_1d_tensor": "tp_group=None",
    },
    "parallel_state": {
        "initialize_model_parallel": (
            "tensor_model_parallel_size=1, pipeline_model_parallel_size=1, virtual_pipeline_model_parallel_size=None, "
            "context_parallel_size=1, expert_model_parallel_size=1, expert_tensor_parallel_size=None, "
            "order='tp-cp-ep-dp-pp'"
        ),
        "RankGenerator": "rank_offset=0",
    },
    "megatron.mpu.initialize": {
        "initialize_model_parallel": (
            "tensor_model_parallel_size_=1, pipeline_model_parallel_size_=1, virtual_pipeline_model_parallel_size_=None"
        ),
        "is_pipeline_first_stage": "ignore_virtual=False",
        "is_pipeline_last_stage": "ignore_virtual=False",
    },
    "megatron.mpu.layers": {
        "ColumnParallelLinear": (
            "bias=True, gather_output=True, stride=1, keep_master_weight_for_test=False, skip_bias_add=False, "
            "moe=False, enable_expert_tensor_parallelism=False"
        ),
        "RowParallelLinear": (
            "bias=True, input_is_parallel=False, stride=1, keep_master_weight_for_test=False, skip_bias_add=False, "
            "moe=False, enable_expert_tensor_parallelism=False"
        ),
    },
    "megatron.models.language_module": {
        "LanguageModule": "pg_collection=None",
        "LanguageModule.sharded_state_dict": "prefix='', sharded_offsets=(), metadata=None",
        "LanguageModule.tie_embeddings_and_output_weights_state_dict": "metadata={}",
    },
    "megatron.models.gpt": {
        "GPTModel": (
            "pre_process=True, post_process=True, fp16_lm_cross_entropy=False, parallel_output=True, "
            "share_embeddings_and_output_weights=False, position_embedding_type='learned_absolute', "
            "rotary_percent=1.0, rotary_base=10000, rope_scaling=False, rope_scaling_factor=8.0, "
            "scatter_embedding_sequence_parallel=True, seq_len_interpolation_factor=None, mtp_block_spec=None, "
            "pg_collection=None, vp_stage=None"
        ),
        "GPTModel.forward": (
            "decoder_input=None, labels=None, inference_context=None, packed_seq_params=None, extra_block_kwargs=None, "
            "runtime_gather_output=None"
        ),
    },
    "megatron.models.bert": {
        "BertModel": (
            "pre_process=True, post_process=True, seq_len_interpolation_factor=None, add_binary_head=True, "
            "return_embeddings=False, vp_stage=None, pg_collection=None"
        ),
        "BertModel.forward": "tokentype_ids=None, lm_labels=None, inference_context=None",
    },
}


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
    ("module", "name", "expected"),
    [(module, name, expected) for module, names in DEFAULTS.items() for name, expected in names.items()],
)
def test_defaults_are_the_references(module, name, expected):
    """Where one may be given by position, it has Megatron's place among them."""
    parameters = inspect.signature(found(f"shardwise.{module}", name)).parameters
    (call,) = ast.parse(f"f({expected.removeprefix('*, ')})").body
    given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.value.keywords}
    # An empty dict in a signature would be shared by all calls.
    ours = {name: parameters[name].default for name in given}
    assert {name: {} if name == "metadata" and value is None else value for name, value in ours.items()} == {
        name: {} if name == "metadata" and value is None else value for name, value in given.items()
    }
    kind = inspect.Parameter.KEYWORD_ONLY if expected.startswith("*") else inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert {parameters[name].kind for name in given} == {kind}
    # In the order in which the reference has them.
    assert [name for name in parameters if name in given] == list(given)


@pytest.mark.parametrize(
    "module",
    [
        *MODULES,
        *MODELS,
        "shardwise.megatron.process_groups_config",
        "shardwise.megatron.config",
        "shardwise.megatron.datasets",
        "shardwise.megatron.dist_checkpointing",
        "shardwise.megatron.distributed",
        "shardwise.megatron.enums",
        "shardwise.megatron.initialize",
        "shardwise.megatron.layer_parts",
        "shardwise.megatron.layer_specs",
        "shardwise.megatron.module",
        "shardwise.megatron.moe",
        "shardwise.megatron.mpu",
        "shardwise.megatron.mpu.initialize",
        "shardwise.megatron.mpu.layers",
        "shardwise.megatron.mpu.mappings",
        "shardwise.megatron.mpu.random",
        "shardwise.megatron.mpu.utils",
        "shardwise.megatron.num_microbatches_calculator",
        "shardwise.megatron.optimizer",
        "shardwise.megatron.p2p_communication",
        "shardwise.megatron.packed_seq_params",
        "shardwise.megatron.rotary_pos_embedding",
        "shardwise.megatron.spec_utils",
        "shardwise.megatron.symmetric_exchanges",
        "shardwise.megatron.tokenizers",
        "shardwise.megatron.transformer_layer",
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
        if not name.startswith("_") and getattr(value, "__module__", None) == imported.__name__
    }
    assert defined <= offered
    documented = set(re.findall(r"`(\w+)", GUIDE))
    assert offered <= documented, f"the pages docs/porting*.md do not mention {sorted(offered - documented)}"
    for name in offered:
        value = getattr(imported, name)
        if inspect.isfunction(value) or inspect.isclass(value):
            assert inspect.getdoc(value), f"{name} has no docstring"


STATES = ("same", "better", "other", "ours")
# What programs reach into beside: by module, parameters in order where it is called.
REACHED_INTO = {
    "tensor_parallel.cross_entropy": {
        "_VocabParallelCrossEntropy.forward": ["ctx", "vocab_parallel_logits", "target", "label_smoothing"]
    },
    "tensor_parallel.data": {
        "_MAX_DATA_DIM": None,
        "_check_data_types": ["keys", "data", "target_dtype"],
        "_build_key_size_numel_dictionaries": ["keys", "data", "tp_group"],
    },
    "tensor_parallel.layers": {
        "_MODEL_PARALLEL_ATTRIBUTE_DEFAULTS": None,
        "ColumnParallelLinear._forward_impl": ["input", "weight"],
        "RowParallelLinear._forward_impl": ["input", "weight"],
        "LinearWithFrozenWeight.forward": ["ctx", "input", "weight", "bias", "allreduce_dgrad", "tp_group"],
        "LinearWithGradAccumulationAndAsyncCommunication.forward": [
            "ctx", "input", "weight", "bias", "gradient_accumulation_fusion", "allreduce_dgrad", "sequence_parallel",
            "grad_output_buffer", "wgrad_deferral_limit", "tp_group",
        ],
    },
    "tensor_parallel.random": {
        "_get_cuda_rng_state": ["device", "clone", "graph_safe"],
        "_set_cuda_rng_state": ["new_state", "device", "graph_safe"],
        "_get_all_rng_states": [],
        "_set_all_rng_states": ["cpu_rng_state", "cuda_rng_state", "cuda_rng_state_tracker"],
        "CheckpointFunction.forward": ["ctx", "run_function", "distribute_saved_activations"],
        "CheckpointWithoutOutput._recompute": None,
        "CheckpointWithoutOutputFunction.forward": ["ctx", "run_function", "checkpoint_without_output_obj"],
    },
    "megatron.models.language_module": {
        "LanguageModule.state_dict_for_save_checkpoint": ["prefix", "keep_vars"],
        "LanguageModule.set_is_first_microbatch": [],
    },
}  # fmt: skip


def rows_of_the_guide():
    """Of each section that is about a module: its names, each with its state."""
    sections = {}
    for section in GUIDE.split("\n## ")[1:]:
        heading = re.match(r"`([\w.]+)`", section)
        if heading is not None:
            rows = [line[2:].split(" | ") for line in section.splitlines() if line.startswith("| `")]
            sections[heading.group(1)] = [(name, row[1]) for row in rows for name in re.findall(r"`([\w.]+)`", row[0])]
    return sections


@pytest.mark.parametrize(
    ("module", "name", "parameters"),
    [(module, name, parameters) for module, names in REACHED_INTO.items() for name, parameters in names.items()],
)
def test_what_programs_reach_into_is_there(module, name, parameters):
    value = found(f"shardwise.{module}", name)
    if parameters is not None:
        ours = [name for name in inspect.signature(value).parameters if name != "self"]
        assert ours[: len(parameters)] == parameters


def test_the_guide_gives_every_item_of_the_surface_a_state():
    """Each name of the surface, methods included, stands in its module's table, once, with one of the states."""
    sections = rows_of_the_guide()
    wanted = [(module.removeprefix("shardwise."), name) for module, name, _ in NAMES]
    wanted += [(module, name.removesuffix(".forward")) for module, names in REACHED_INTO.items() for name in names]
    of_submodules = {
        name for module, rows in sections.items() if module.startswith("tensor_parallel.") for name, _ in rows
    }
    for module, name in wanted:
        if module == "tensor_parallel":
            # The package offers what its modules do.
            assert name in of_submodules, name
            continue
        states = [state for row, state in sections[module] if row == name]
        assert len(states) == 1, f"docs/porting*.md, {module}: {name} stands in {len(states)} rows of its section"
        assert states[0] in STATES, (
            f"docs/porting*.md, {module}: the state of {name} is {states[0]!r}, none of {STATES}"
        )


def refusals():
    table = re.search(r"\n## Refused\n(.*?)\n## ", GUIDE, re.DOTALL)
    return re.findall(r"^\| `(.+?)` \| `(\w+)` \|", table.group(1), re.MULTILINE)


@pytest.mark.parametrize(("call", "error"), refusals())
def test_what_the_guide_calls_refused_is_refused(call, error):
    x, weight, marked = torch.ones(1, 1, 2, requires_grad=True), torch.ones(3, 2), torch.ones(1)
    marked.is_qkv = True
    names = {"torch": torch, "x": x, "weight": weight, "marked": marked}
    names["sizes"] = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    for module in (*MODULES, *MODELS, "shardwise.megatron.config", "shardwise.megatron.initialize"):
        names |= {name: value for name, value in vars(importlib.import_module(module)).items() if name[0] != "_"}
    with pytest.raises(errors.ShardwiseError) as info:
        eval(call, names)
    assert type(info.value).__name__ == error


def test_the_guide_names_nothing_that_is_not_there():
    """Every name in the first column of the guide's tables is in the module that its heading names."""
    missing = []
    for module, rows in rows_of_the_guide().items():
        for name, _ in rows:
            try:
                found(f"shardwise.{module}", name)
            except AttributeError:
                missing.append(f"{module}.{name}")
    assert missing == []


def test_every_module_of_the_reference_is_offered_or_named_as_not():
    """``reference_modules.json`` has the modules of Megatron, by package."""
    kept = json.loads((Path(__file__).parent / "reference_modules.json").read_text())
    modules = {f"{package}.{name}" for package, names in kept.items() for name in names}
    assert len(modules) > 500
    table = GUIDE[GUIDE.index("\n## Not offered\n") :]
    rows = [row.split(" | ")[0] for row in table.splitlines() if row.startswith("| `")]
    named = [f"megatron.core.{name}" for row in rows for name in re.findall(r"`([\w.]+)`", row)]
    covered = {name: {module for module in modules if f"{module}.".startswith(f"{name}.")} for name in named}
    shardwise.megatron.install()
    try:
        offered = {module for module in modules if module in sys.modules}
    finally:
        shardwise.megatron.uninstall()
    assert sorted(modules - offered - set().union(*covered.values())) == [], "neither offered nor in the guide's list"
    assert sorted(name for name in named if covered[name] & offered) == [], "in the guide's list, and offered"
    assert sorted(name for name in named if not covered[name]) == [], "in the guide's list, and no module of Megatron"
    assert len(named) == len(set(named))


def test_every_name_of_an_offered_module_is_there_or_refuses():
    """``reference_names.json`` has the public names of Megatron's modules that are offered here."""
    kept = json.loads((Path(__file__).parent / "reference_names.json").read_text())
    shardwise.megatron.install()
    try:
        missing = [
            f"{module}.{name}"
            for module, names in kept.items()
            for name in names.split()
            if not hasattr(importlib.import_module(module), name)
        ]
    finally:
        shardwise.megatron.uninstall()
    assert missing == []


def test_absent_names_are_in_the_guide_and_raise_when_they_are_used():
    shardwise.megatron.install()
    try:
        for module, names in ABSENT.items():
            for name in names:
                value = getattr(importlib.import_module(f"megatron.core.{module}"), name)
                # One object each, which knows no instances and may be a base.
                assert value is getattr(sys.modules[f"megatron.core.{module}"], name)
                assert not isinstance(torch.nn.Linear(1, 1), value)
                for used in (value, type("Own", (value,), {})):
                    with pytest.raises(errors.ConfigError, match=f"^{name} is not offered here: "):
                        used(1, option=2)
            with pytest.raises(ImportError, match="NoSuchName"):
                exec(f"from megatron.core.{module} import NoSuchName")
    finally:
        shardwise.megatron.uninstall()
    section = GUIDE[GUIDE.index("\n## Names that refuse\n") : GUIDE.index("\n## Not offered\n")]
    rows = [row[2:-2].split(" | ") for row in section.splitlines() if row.startswith("| `")]
    told = {
        (module, name): why
        for names, why in rows
        for module, row in re.findall(r"`([\w.]+)`: ((?:`\w+`(?:, )?)+)", names)
        for name in re.findall(r"\w+", row)
    }
    assert told == {(module, name): why for module, names in ABSENT.items() for name, why in names.items()}
