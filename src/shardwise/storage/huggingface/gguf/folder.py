"""A GGUF file as a Hugging Face folder: names and fields of ``transformers``, and weights in fp32.

llama.cpp stores the rows of Llama's queries and keys in another order, for rotation of neighbours, and Gemma's norms
with 1 added. Both are undone when a tensor is read. ``config.json`` and the tokenizer's files are written to a
temporary folder, which is removed with the object.
"""

import dataclasses
import json
import math
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.core.errors import CheckpointError, ConfigError
from shardwise.core.json_text import shown
from shardwise.core.tensor_files import StoredTensor, read_box
from shardwise.storage.huggingface.gguf.header import GgufTensor, library, read_header
from shardwise.storage.huggingface.gguf.tokenizer import write_tokenizer
from shardwise.storage.huggingface.tensor_folder import TensorFolder

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    **{f"attn_{each}": f"self_attn.{each}_proj" for each in ("q", "k", "v", "qkv")},
    **{f"attn_{each}_norm": f"self_attn.{each}_norm" for each in ("q", "k")},
    **{f"ffn_{each}": f"mlp.{each}_proj" for each in ("gate", "up", "down")},
    **{f"ffn_{each}_shexp": f"mlp.shared_expert.{each}_proj" for each in ("gate", "up", "down")},
    **{f"ffn_{each}_exps": f"mlp.experts.*.{each}_proj" for each in ("gate", "up", "down")},
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_GEMMA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FIELDS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_NEEDED = ("context_length", "block_count", "embedding_length", "attention.head_count")
_EXPERT_FIELDS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_GEMMA_FIELDS = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_PHI_FIELDS = {
    "attention.sliding_window": "sliding_window",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}


@dataclass(frozen=True)
class _Family:
    """An architecture of llama.cpp: its ``model_type``, and what differs from the usual names and fields."""

    model_type: str
    names: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    rotates_neighbours: bool = False
    adds_one: bool = False
    layers_of_largest: int | None = None


_FAMILIES = {
    "llama": _Family("llama", rotates_neighbours=True),
    "qwen2": _Family("qwen2"),
    "qwen3": _Family("qwen3"),
    "qwen2moe": _Family("qwen2_moe", fields=_EXPERT_FIELDS),
    # llama.cpp has no key for it, and always normalises.
    "qwen3moe": _Family("qwen3_moe", fields=_EXPERT_FIELDS, fixed={"norm_topk_prob": True}),
    "phi3": _Family("phi3", names={"ffn_up": "mlp.gate_up_proj"}, fields=_PHI_FIELDS),
    "gemma2": _Family("gemma2", names=_GEMMA_NAMES, fields=_GEMMA_FIELDS, adds_one=True, layers_of_largest=46),
    "gemma3": _Family("gemma3_text", names=_GEMMA_NAMES, fields=_GEMMA_FIELDS, adds_one=True, layers_of_largest=62),
}


@dataclass(frozen=True)
class _Part:
    """Rows of a stored tensor that are one tensor of ``transformers``."""

    stored: GgufTensor
    head: int = 0
    adds_one: bool = False


class GgufFolder(TensorFolder):
    """A ``TensorFolder`` of one GGUF file.

    Attributes:
        folder: temporary folder with ``config.json`` and the tokenizer's files.
        config: content of ``config.json``.

    Raises:
        CheckpointError, DataError: the file is damaged, or its tokenizer.
        ConfigError: the architecture or an entry is not supported, or the library ``gguf`` is missing.
    """

    def __init__(self, path: Path) -> None:
        values, stored = read_header(path)
        self.bytes_read, self.copies, self.indexed = 0, [], set()
        architecture = values.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in _FAMILIES:
            raise ConfigError(
                f"{path} is of architecture {shown(architecture)}; GGUF files are read of {', '.join(_FAMILIES)}"
            )
        _check_single(path, values, f"{architecture}.")
        if values.get("split.count", 0) not in (0, 1):
            raise ConfigError(
                f"{path} is one of {shown(values['split.count'])} parts; join them with llama-gguf-split --merge"
            )
        family = _FAMILIES[architecture]
        self.config = _config(path, family, values, stored)
        self._parts: dict[str, _Part] = {}
        self.tensors = {}
        for tensor in stored.values():
            self._take(path, family, tensor)
        temporary = tempfile.mkdtemp(prefix="shardwise-gguf-")
        weakref.finalize(self, shutil.rmtree, temporary, ignore_errors=True)
        # Cards and messages name the model by its folder. The stem of "...gguf" is "..".
        self.folder = Path(temporary) / (path.stem.strip(".") or "model")
        self.folder.mkdir()
        (self.folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")
        write_tokenizer(values, self.folder, path)

    def _take(self, path: Path, family: _Family, tensor: GgufTensor) -> None:
        """Add the tensors that one tensor of the file holds; experts are separate."""
        name = _name(family, tensor.name)
        is_row = tensor.name.startswith("blk.") and tensor.name.endswith("ffn_gate_inp_shexp.weight")
        shape = (1, *tensor.shape) if is_row and len(tensor.shape) == 1 else tensor.shape
        part = _Part(tensor, adds_one=family.adds_one and name.endswith("norm.weight"))
        for kind, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
            if family.rotates_neighbours and f".{kind}_proj." in name:
                part = _Part(tensor, head=_head(path, tensor, self.config[heads]))
        count = tensor.shape[0] if ".*." in name else 1
        if ".*." in name and count != (expected := self.config.get("num_experts")):
            raise CheckpointError(
                f"{path}: tensor {tensor.name!r} has {count} experts, and the model {shown(expected)}"
            )
        shape = shape[1:] if ".*." in name else shape
        for index in range(count):
            size = tensor.num_bytes // count
            start = tensor.start + index * size
            own = name.replace(".*.", f".{index}.")
            if own in self.tensors:
                raise CheckpointError(f"{path} holds tensor {own!r} twice, also as {tensor.name!r}")
            self.tensors[own] = StoredTensor(own, path, "F32", shape, start, size)
            self._parts[own] = dataclasses.replace(part, stored=dataclasses.replace(tensor, shape=shape, start=start))

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Like ``TensorFolder.read``; whole rows are read, of Llama's queries and keys those of whole heads."""
        part, file = self._parts[name], self.tensors[name].file
        stored, head = part.stored, part.head or 1
        num_rows = math.prod(stored.shape[:-1])
        first, stop = (offsets[0], offsets[0] + sizes[0]) if len(stored.shape) > 1 else (0, 1)
        if len(stored.shape) > 1:
            low, high = first // head * head, -(-stop // head) * head
        else:
            low, high = 0, 1
        rows = StoredTensor(name, file, "U8", (num_rows, stored.row_bytes), stored.start, num_rows * stored.row_bytes)
        blocks = read_box(rows, (low, 0), (high - low, stored.row_bytes))
        self.bytes_read += blocks.nbytes
        with np.errstate(all="ignore"):
            values = torch.from_numpy(np.array(library().dequantize(blocks.numpy(), stored.type), np.float32))
        if len(stored.shape) == 1:
            values, first, stop, low = values[0], offsets[0], offsets[0] + sizes[0], 0
        if part.head:
            # Stored are the pairs (0, d/2), (1, d/2 + 1), ... of each head.
            values = values.reshape(-1, head // 2, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
        if part.adds_one:
            values = values - 1
        box = values[first - low : stop - low]
        return box if len(stored.shape) == 1 else box[:, offsets[1] : offsets[1] + sizes[1]]


def is_gguf(path: Path) -> bool:
    """True for a file, not a folder, that is named as GGUF files are."""
    return path.suffix.lower() == ".gguf" and path.is_file()


def _name(family: _Family, stored: str) -> str:
    """Return the name in ``transformers``; the stored one, for which the model has no place, if it is unknown."""
    name, _, ending = stored.rpartition(".")
    if name in _NAMES:
        return f"{_NAMES[name]}.{ending}"
    first, _, rest = name.partition(".")
    layer, _, kind = rest.partition(".")
    known = family.names.get(kind, _LAYER_NAMES.get(kind))
    return f"model.layers.{layer}.{known}.{ending}" if first == "blk" and known is not None else stored


def _head(path: Path, tensor: GgufTensor, heads: Any) -> int:
    """Return the number of rows of each head."""
    if type(heads) is not int or heads < 1 or tensor.shape[0] % (2 * heads):
        raise CheckpointError(
            f"{path}: tensor {tensor.name!r} has {tensor.shape[0]} rows, which are not {shown(heads)} heads of pairs"
        )
    return tensor.shape[0] // heads


def _check_single(path: Path, values: Mapping[str, Any], prefix: str) -> None:
    """Refuse lists where one value is read; files of models whose layers differ have them."""
    for key, value in values.items():
        is_id = key.startswith("tokenizer.ggml.") and key.endswith("_id")
        if isinstance(value, list | np.ndarray) and (is_id or key.startswith(prefix) or key == "split.count"):
            raise ConfigError(f"{path}: {key} is a list of {len(value)} values; one value for all layers is read")


def _config(
    path: Path, family: _Family, values: Mapping[str, Any], tensors: Mapping[str, GgufTensor]
) -> dict[str, Any]:
    """Return the fields of ``config.json``; an entry of the architecture that is not read is an error."""
    prefix = f"{values['general.architecture']}."
    own = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
    if missing := [key for key in _NEEDED if key not in own] or [f for f in ("token_embd.weight",) if f not in tensors]:
        raise CheckpointError(f"{path} lacks {missing[0]}")
    names = {**_FIELDS, **family.fields}
    fields = {names[key]: own.pop(key) for key in list(own) if key in names}
    heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
    if type(heads) is not int or type(hidden) is not int or heads < 1:
        raise ConfigError(f"{path}: {shown(heads)} heads of {shown(hidden)} are not read; all layers must be alike")
    width = fields.setdefault("head_dim", hidden // heads)
    vocab_size = tensors["token_embd.weight"].shape[0]
    rotated = own.pop("rope.dimension_count", width)
    if family.model_type == "phi3" and type(rotated) is int and rotated != width:
        fields["partial_rotary_factor"], rotated = rotated / width, width
    if own.get("rope.scaling.type") == "linear":
        del own["rope.scaling.type"]
        fields["rope_scaling"] = {"rope_type": "linear", "factor": own.pop("rope.scaling.factor", None)}
    expected = {"attention.value_length": width, "vocab_size": vocab_size, "rope.scaling.type": "none"}
    for key, found in {**own, "rope.dimension_count": rotated}.items():
        wanted = {**expected, "rope.dimension_count": width}.get(key)
        if wanted is None or found != wanted:
            rule = "is not read" if wanted is None else f"must be {shown(wanted)} here"
            raise ConfigError(f"{path}: {prefix}{key} is {shown(found)}, which {rule}")
    if family.layers_of_largest is not None:
        # As in llama.cpp, which has no key for it either.
        is_largest = fields["num_hidden_layers"] == family.layers_of_largest
        fields["query_pre_attn_scalar"] = hidden // heads if is_largest else width
    ids = {kind: values.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos", "eot")}
    for kind, value in ids.items():
        if value is not None and (type(value) is not int or not 0 <= value < vocab_size):
            rule = f"it must be from 0 to {vocab_size - 1}"
            raise CheckpointError(f"{path}: tokenizer.ggml.{kind}_token_id is {shown(value)}; {rule}")
    ends = [ids[kind] for kind in ("eos", "eot") if ids[kind] is not None]
    return {
        "model_type": family.model_type,
        **family.fixed,
        "num_key_value_heads": heads,
        **fields,
        "vocab_size": vocab_size,
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": ids["bos"],
        "eos_token_id": list(dict.fromkeys(ends)) or None,
        "dtype": "float32",
    }
