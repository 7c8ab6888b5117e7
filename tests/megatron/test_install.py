"""The door for programs written for Megatron: aliases, and nothing behind them twice."""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from harness.program import run

import shardwise.megatron
from shardwise import parallel_state, tensor_parallel
from shardwise.core.errors import ConfigError
from shardwise.megatron import datasets, distributed, layer_specs, module, tokenizers, utils
from shardwise.megatron.aliases import SHORT
from shardwise.megatron.config import ModelParallelConfig, TransformerConfig
from shardwise.megatron.layer_parts import MLP, SelfAttention
from shardwise.megatron.models import language_module
from shardwise.megatron.models.bert import BertModel
from shardwise.megatron.models.embedding import LanguageModelEmbedding
from shardwise.megatron.models.gpt import GPTModel
from shardwise.megatron.schedules import get_forward_backward_func
from shardwise.megatron.transformer_layer import TransformerLayer


@pytest.fixture
def installed():
    shardwise.megatron.install()
    yield
    shardwise.megatron.uninstall()
    assert not [name for name in sys.modules if name.partition(".")[0] == "megatron"]


@pytest.mark.usefixtures("installed")
def test_imports_of_every_kind_find_the_same_objects():
    import megatron.core.parallel_state as ps
    import megatron.core.tensor_parallel.layers
    from megatron.core import ModelParallelConfig as TheirConfig, mpu
    from megatron.core.models.bert.bert_model import BertModel as TheirBert
    from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding as TheirEmbedding
    from megatron.core.models.common.language_module import language_module as theirs
    from megatron.core.models.gpt.gpt_model import GPTModel as TheirGPT
    from megatron.core.pipeline_parallel import get_forward_backward_func as theirs_of_package
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func as theirs_of_module
    from megatron.core.tensor_parallel.mappings import _CopyToModelParallelRegion
    from megatron.core.transformer.transformer_config import TransformerConfig as TheirTransformerConfig

    assert ps is parallel_state
    assert mpu is parallel_state
    assert megatron.core.tensor_parallel is tensor_parallel
    assert megatron.core.tensor_parallel.layers is sys.modules["shardwise.megatron.core.tensor_parallel.layers"]
    assert megatron.core.utils is utils
    assert TheirConfig is ModelParallelConfig
    assert TheirTransformerConfig is TransformerConfig
    assert theirs is language_module
    assert (TheirGPT, TheirBert, TheirEmbedding) == (GPTModel, BertModel, LanguageModelEmbedding)
    assert theirs_of_package is theirs_of_module is get_forward_backward_func
    assert _CopyToModelParallelRegion is tensor_parallel.mappings._CopyToModelParallelRegion


SHORT_NAMES = """
import sys
import shardwise
assert "torch" not in sys.modules and "shardwise.megatron" not in sys.modules
import shardwise.tensor_parallel.layers
from shardwise.tensor_parallel import mappings
from shardwise import parallel_state
import shardwise.megatron.models.gpt as gpt
import shardwise.megatron.core.tensor_parallel as real
assert shardwise.tensor_parallel is real and real.__spec__.name == real.__name__
assert shardwise.tensor_parallel.layers is real.layers and mappings is real.mappings
assert parallel_state is sys.modules["shardwise.megatron.core.parallel_state"]
from shardwise.megatron.config import TransformerConfig
assert gpt.TransformerConfig is TransformerConfig is shardwise.megatron.config.TransformerConfig
real.mappings.divide = gpt
from shardwise.tensor_parallel.mappings import divide
assert divide is gpt
try:
    import shardwise.tensor_parallel.no_such_module
except ModuleNotFoundError as error:
    assert error.name == "shardwise.megatron.core.tensor_parallel.no_such_module"
else:
    raise AssertionError("it was imported")
"""


def test_a_short_name_is_the_module_itself_from_the_start():
    run("-W", "error", "-c", SHORT_NAMES)


def test_every_short_name_is_documented_and_imports():
    guide = (Path(__file__).parents[2] / "docs" / "porting.md").read_text()
    for short, target in SHORT.items():
        assert importlib.import_module(short) is importlib.import_module(target), short
        # What lies in these two is Megatron's, or was a module before.
        if not short.startswith(("shardwise.parallel_state.", "shardwise.tensor_parallel.")):
            assert f"`{short}" in guide or f"`{short.rpartition('.')[2]}`" in guide, short


@pytest.mark.usefixtures("installed")
def test_packages_that_name_what_their_modules_hold():
    import megatron.core.distributed as theirs
    from megatron import mpu
    from megatron.core import dist_checkpointing
    from megatron.core.datasets.gpt_dataset import MockGPTDataset
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tokenizers import MegatronTokenizer
    from megatron.core.transformer.module import MegatronModule
    from megatron.initialize import initialize_megatron
    from megatron.mpu.initialize import get_tensor_model_parallel_rank

    # A function with the name of its module.
    assert theirs.finalize_model_grads is finalize_model_grads is distributed.finalize_model_grads
    assert theirs.DistributedDataParallel is distributed.DistributedDataParallel
    assert dist_checkpointing.ShardedTensor is ShardedTensor
    assert (MockGPTDataset, MegatronTokenizer) == (datasets.MockGPTDataset, tokenizers.MegatronTokenizer)
    assert (MegatronModule, get_gpt_layer_local_spec) == (module.MegatronModule, layer_specs.get_gpt_layer_local_spec)
    # Megatron-DeepSpeed's package has what Megatron has in two, and layers of its own.
    assert mpu is shardwise.megatron.mpu
    assert mpu.get_tensor_model_parallel_rank is get_tensor_model_parallel_rank
    assert get_tensor_model_parallel_rank is parallel_state.get_tensor_model_parallel_rank
    assert (
        mpu.ColumnParallelLinear
        is mpu.layers.ColumnParallelLinear
        is sys.modules["megatron.mpu.layers"].ColumnParallelLinear
    )
    assert mpu.broadcast_data is mpu.data.broadcast_data is tensor_parallel.broadcast_data
    assert mpu.divide is utils.divide
    assert initialize_megatron is shardwise.megatron.initialize.initialize_megatron


# What real programs import, by module of Megatron's.
IMPORTED = {
    "core": "DistributedDataParallel ModelParallelConfig mpu parallel_state tensor_parallel utils",
    "core.dist_checkpointing.mapping": "ShardedObject ShardedStateDict ShardedTensor",
    "core.enums": "ModelType",
    "core.fusions.fused_bias_dropout": "get_bias_dropout_add",
    "core.fusions.fused_layer_norm": "FusedLayerNorm",
    "core.inference.communication.torch_symm_triton": (
        "fused_multimem_rs_add_norm_ag multimem_all_gather multimem_reduce_scatter"
    ),
    "core.models.bert.bert_lm_head": "BertLMHead",
    "core.models.bert.pooler": "Pooler",
    "core.models.common.embeddings.rotary_pos_embedding": (
        "MultimodalRotaryEmbedding RotaryEmbedding apply_rotary_pos_emb"
    ),
    "core.num_microbatches_calculator": (
        "get_num_microbatches init_num_microbatches_calculator reconfigure_num_microbatches_calculator "
        "update_num_microbatches destroy_num_microbatches_calculator"
    ),
    "core.optimizer": "ChainedOptimizer DistributedOptimizer OptimizerConfig get_megatron_optimizer",
    "core.packed_seq_params": "PackedSeqParams",
    "core.pipeline_parallel.p2p_communication": "P2PCommunicator",
    "core.tensor_parallel.inference_layers": "HAVE_TE multimem_all_gather multimem_reduce_scatter",
    "core.tensor_parallel.layers": "HAVE_TE custom_bwd custom_fwd dist_all_gather_func dist_reduce_scatter_func",
    "core.tensor_parallel.mappings": "dist_all_gather_func dist_reduce_scatter_func",
    "core.tensor_parallel.random": "HAVE_TE",
    "core.tensor_parallel.utils": "dist_all_gather_func",
    "core.transformer": (
        "MLATransformerConfig MegatronModule ModuleSpec TransformerConfig TransformerLayer TransformerLayerSubmodules "
        "build_module"
    ),
    "core.transformer.attention": "CrossAttention SelfAttention SelfAttentionSubmodules",
    "core.transformer.dot_product_attention": "DotProductAttention",
    "core.transformer.enums": "AttnBackend AttnMaskType LayerType ModelType",
    "core.transformer.identity_op": "IdentityFuncOp IdentityOp",
    "core.transformer.mlp": "MLP MLPSubmodules",
    "core.transformer.spec_utils": "ModuleSpec build_module get_module import_module",
    "core.transformer.torch_norm": "WrappedTorchNorm",
    "core.transformer.transformer_config": "MLATransformerConfig TransformerConfig",
    "core.transformer.transformer_layer": (
        "BaseTransformerLayer MoETransformerLayer TransformerLayer TransformerLayerSubmodules "
        "get_transformer_layer_offset"
    ),
    "core.transformer.utils": (
        "make_sharded_tensors_for_checkpoint sharded_state_dict_default toggle_cuda_graphs get_linear_layer"
    ),
    "core.utils": (
        "get_attr_wrapped_model get_batch_on_this_cp_rank get_model_config prepare_input_tensors_for_wgrad_compute "
        "unwrap_model"
    ),
}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("module", IMPORTED)
def test_names_that_programs_import(module):
    scope = {}
    exec(f"from megatron.{module} import {', '.join(IMPORTED[module].split())}", scope)
    assert all(scope[name] is not None for name in IMPORTED[module].split())


@pytest.mark.usefixtures("installed")
def test_a_program_s_own_autograd_function_under_autocast():
    from megatron.core.tensor_parallel.layers import HAVE_TE, custom_bwd, custom_fwd, dist_all_gather_func

    class Double(torch.autograd.Function):
        @staticmethod
        @custom_fwd
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        @custom_bwd
        def backward(ctx, grad):
            return 2 * grad

    x = torch.ones(2, requires_grad=True)
    Double.apply(x).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]
    assert dist_all_gather_func is torch.distributed.all_gather_into_tensor
    assert HAVE_TE is False


def test_models_and_layers_are_modules_of_megatron_s():
    for kind in (language_module.LanguageModule, GPTModel, BertModel, TransformerLayer, SelfAttention, MLP):
        assert issubclass(kind, module.MegatronModule)
    # Their methods are those of the engine, but for what the engine does not have.
    for name in ("sharded_state_dict", "__init__"):
        assert getattr(language_module.LanguageModule, name) is not getattr(module.MegatronModule, name)


@pytest.mark.usefixtures("installed")
def test_a_second_call_changes_nothing():
    before = {name: module for name, module in sys.modules.items() if name.startswith("megatron")}
    shardwise.megatron.install()
    assert {name: module for name, module in sys.modules.items() if name.startswith("megatron")}.keys() == before.keys()
    assert sys.modules["megatron.core.utils"] is utils


@pytest.mark.usefixtures("installed")
def test_what_is_not_offered_is_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"megatron\.core\.ssm"):
        importlib.import_module("megatron.core.ssm")
    with pytest.raises(ImportError, match=r"name 'get_args' from 'megatron\.training' .*shardwise.megatron"):
        exec("from megatron.training import get_args")


SIBLINGS = """
import pathlib, sys
for name in ("beside", "core/ssm", "core/utils", "mpu/more"):
    folder = pathlib.Path(sys.argv[1], "megatron", name)
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("value = 7")
sys.path.insert(0, sys.argv[1])
import shardwise.megatron
for _ in range(2):
    shardwise.megatron.install()
    import megatron.beside, megatron.core.utils
    assert megatron.beside.value == 7
    # What is installed of Megatron Core itself fills no gap.
    assert megatron.core.utils.__name__.startswith("shardwise.")
    for missing in ("core.ssm", "mpu.more"):
        try:
            __import__(f"megatron.{missing}")
        except ModuleNotFoundError as error:
            assert missing in str(error) or "mpu" in missing
        else:
            raise AssertionError(missing)
shardwise.megatron.uninstall()
shardwise.megatron.install()
"""


def test_installed_packages_beside_megatron_core_are_found(tmp_path):
    run("-W", "error", "-c", SIBLINGS, str(tmp_path))


def test_the_real_one_is_not_replaced(monkeypatch):
    real = ModuleType("megatron.core")
    monkeypatch.setitem(sys.modules, "megatron.core", real)
    with pytest.raises(ConfigError, match=r"megatron\.core is already imported; call shardwise\.megatron\.install"):
        shardwise.megatron.install()
    assert sys.modules["megatron.core"] is real
    assert "megatron" not in sys.modules


@pytest.mark.slow
def test_the_example_of_the_guide_runs():
    guide = (Path(__file__).parents[2] / "docs" / "porting.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    (example,) = [example for example in examples if "megatron.install()" in example]
    run("-W", "error", "-c", example)


def test_the_null_tokenizer_of_older_examples_is_there_unless_its_package_is_installed(tmp_path, monkeypatch):
    shardwise.megatron.install()
    older = importlib.import_module("megatron.training.tokenizer.tokenizer")._NullTokenizer(7)
    shardwise.megatron.uninstall()
    assert (older.vocab_size, older.eod, older.tokenize("3 4")) == (8, 7, [3, 4])
    (tmp_path / "megatron" / "training").mkdir(parents=True)
    (tmp_path / "megatron" / "training" / "__init__.py").write_text("own = 1")
    monkeypatch.syspath_prepend(tmp_path)
    shardwise.megatron.install()
    assert importlib.import_module("megatron.training").own == 1
    for name in ("megatron.training", "megatron"):
        sys.modules.pop(name)
    shardwise.megatron.uninstall()
