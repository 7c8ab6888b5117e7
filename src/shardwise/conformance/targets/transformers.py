"""Target ``transformers``: tensor parallelism of Hugging Face models by their own plan, loaded by ``from_pretrained``.

The model is a Qwen 3 or, without norms of queries and keys, a Llama.
"""

import importlib
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.conformance.dense import IGNORED, Sizes
from shardwise.conformance.targets.dtensor import accumulate as accumulate, number_of, optimizer as optimizer, whole_of
from shardwise.core.topology import Groups

versions: dict[str, str] = {}
# Rotary positions are computed in fp32.
precision = torch.float32
ignored_labels = uneven = True

_LAYER = {
    "norm1": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "norm2": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_MODEL = {"embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
_MODEL |= {"head.weight": "lm_head.weight"}


def _theirs(name: str) -> str:
    """Return the name that a parameter of ``DenseModel`` has in a model of transformers."""
    if name in _MODEL:
        return _MODEL[name]
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{_LAYER[part]}.weight"


def prepare() -> None:
    library = _library()
    versions["transformers"] = library.__version__
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()


def _library() -> Any:
    return importlib.import_module("transformers")


class _Model(nn.Module):
    """A causal model that returns losses; ``names`` has its parameters' names by those of the protocol."""

    def __init__(self, inner: Any, names: dict[str, str]) -> None:
        super().__init__()
        self.inner = inner
        self.names = names

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.inner(input_ids=ids).logits
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
        return losses.view_as(labels)


def language_model(sizes: Sizes, weights: dict[str, Tensor], groups: Groups) -> nn.Module:
    if groups.tp.size() != dist.get_world_size():
        raise NotImplementedError("tensor parallelism alone")
    kind = "Qwen3" if sizes.qk_norm else "Llama"
    config = getattr(_library(), f"{kind}Config")(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.ffn,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=64,
        rms_norm_eps=sizes.epsilon,
        tie_word_embeddings=sizes.tied,
        rope_parameters={"rope_type": "default", "rope_theta": sizes.base},
        attn_implementation="eager",
    )
    whole = _whole(kind, config)
    with torch.no_grad():
        params = dict(whole.named_parameters())
        for name, value in weights.items():
            params[_theirs(name)].copy_(value)
    return _Model(_split(whole, groups), {name: _theirs(name) for name in weights})


def other_models(groups: Groups) -> dict[str, tuple[nn.Module, nn.Module]]:
    """Return GLM-4.5 with ``use_qk_norm``, without experts."""
    config = _library().Glm4MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        use_qk_norm=True,
        first_k_dense_replace=2,
        initializer_range=0.4,
        attn_implementation="eager",
    )
    whole = _whole("Glm4Moe", config)
    names = {name: name for name, _ in whole.named_parameters()}
    return {"GLM-4.5": (_Model(whole, names), _Model(_split(whole, groups), names))}


def _whole(kind: str, config: Any) -> Any:
    return getattr(_library(), f"{kind}ForCausalLM")(config).double()


def _split(whole: Any, groups: Groups) -> Any:
    """Save a model, which is the same on every rank, and load it split over the ranks."""
    folders: list[Any] = [None]
    if dist.get_rank() == 0:
        folders = [tempfile.mkdtemp()]
        whole.save_pretrained(folders[0])
    dist.broadcast_object_list(folders)
    distributed = importlib.import_module("transformers.distributed.configuration_utils")
    model = type(whole).from_pretrained(
        folders[0],
        dtype=torch.float64,
        attn_implementation="eager",
        distributed_config=distributed.DistributedConfig(tp_size=groups.tp.size()),
    )
    return model.train()


def finalize_gradients(module: nn.Module, groups: Groups) -> None:
    """Do nothing: hooks of the plan complete the gradients."""


def _by_name(module: Any, tensor_of: Any) -> dict[str, Tensor]:
    params = dict(module.inner.named_parameters())
    return {name: whole_of(tensor_of(params[own])) for name, own in module.names.items()}


def whole_gradients(module: nn.Module, groups: Groups) -> dict[str, Tensor]:
    return _by_name(module, lambda param: torch.zeros_like(param) if param.grad is None else param.grad)


def whole_parameters(module: nn.Module, groups: Groups) -> dict[str, Tensor]:
    return _by_name(module, lambda param: param.detach())


def grad_norm(module: nn.Module, groups: Groups) -> float:
    return number_of(_trainer()._mixed_mesh_grad_norm(None, module, float("inf")))


def clip(module: nn.Module, max_norm: float, groups: Groups) -> float:
    return number_of(_trainer()._mixed_mesh_grad_norm(None, module, max_norm))


def _trainer() -> Any:
    return importlib.import_module("transformers.trainer").Trainer
