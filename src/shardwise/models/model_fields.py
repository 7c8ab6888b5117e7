"""The fields that describe a model as a function of weights and inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor

from shardwise.models.experts import Experts
from shardwise.models.transformer.heads import GlobalHeads, Heads, LatentAttention
from shardwise.models.transformer.rotary import RotaryScaling
from shardwise.nn.norm import Normalization

NormPosition = Literal["pre", "post", "sandwich", "branch"]

PositionEmbedding = Literal["learned_absolute", "rope", "none", "alibi"]


@dataclass(kw_only=True)
class ModelFields:
    """The parts of a model outside of its layers.

    Attributes:
        kind: class of the model, ``"gpt"`` or ``"bert"``.
        num_tokentypes, add_binary_head, add_lm_head: see ``Bert``.
        transformers_config: the ``config.json`` of a model of transformers that its own plan splits
            (``models.by_plan``), as JSON; other fields are then its sizes. None for a model of ours.

    Other fields are those of ``GPT``, whose arguments replace them.
    """

    kind: Literal["gpt", "bert"] = "gpt"
    vocab_size: int = 0
    max_sequence_length: int = 0
    position_embedding_type: PositionEmbedding = "learned_absolute"
    position_offset: int = 0
    positions_skip_padding: bool = False
    share_embeddings_and_output_weights: bool = False
    rotary_percent: float = 1.0
    rotary_base: float = 10000.0
    rope_scaling: RotaryScaling | None = None
    window_rotary_base: float | None = None
    num_tokentypes: int = 0
    add_binary_head: bool = True
    add_lm_head: bool = True
    transformers_config: str | None = None


@dataclass
class TransformerFields(ModelFields):
    """The model as a function of weights and inputs, and its initial values; training options apart.

    Attributes:
        num_layers: number of transformer layers.
        hidden_size: width of the residual stream.
        num_attention_heads: number of query heads.
        num_query_groups: number of key-value heads; ``num_attention_heads`` if None (multi-head attention).
        ffn_hidden_size: width of the MLP; ``4 * hidden_size`` if None.
        kv_channels: width of a head; ``hidden_size / num_attention_heads`` if None.
        hidden_dropout: dropout probability on the residual branches and the embedding.
        attention_dropout: dropout probability on the attention weights.
        layernorm_epsilon: constant added to the variance.
        norm_position: ``"pre"``, a layer is ``x + f(norm(x))``; ``"post"``, ``norm(x + f(x))`` (BERT); ``"branch"``,
            ``x + norm(f(x))`` (OLMo 2); ``"sandwich"``, ``x + norm(f(norm(x)))`` (Gemma 2).
        parallel_residual: whether a layer is ``x + attention(norm(x)) + mlp(norm'(x))`` (GPT-NeoX); with pre-norm.
        residual_multiplier: factor of the outputs of attention and MLP on the residual stream (Granite).
        embedding_multiplier: factor of the word embedding, rounded to its dtype (Gemma, Granite).
        final_logit_softcap: ``c``; logits ``z`` become ``c * tanh(z / c)`` (Gemma 2); no softcap if None.
        logits_scaling: divisor of the logits, after the softcap (Granite).
        attention_logit_softcap: softcap of the attention scores, which are then computed in blocks of queries, and
            recomputed in the backward.
        attention_sinks: whether each query head has a learned logit in the denominator of its softmax (GPT-OSS), for no
            key; attention is computed as with a softcap.
        apply_residual_connection_post_layernorm: with pre-norm, whether a layer is ``norm(x) + f(norm(x))`` instead of
            ``x + f(norm(x))`` (an option of BLOOM).
        embedding_layernorm: whether there is a norm after the embedding (BLOOM, BERT).
        final_layernorm: whether there is a norm after the last layer.
        layernorm_zero_centered_gamma: whether norms store ``weight - 1``, which starts at 0, so that weight decay pulls
            the weight towards 1.
        qk_layernorm: whether each head's query and key have norms of width ``kv_channels``, before rotation (Qwen 3).
        qk_layernorm_over_heads: whether these norms are over all heads of a token together (OLMo 2); RMSNorm only.
        value_layernorm: whether each head's value is normed over its width, without a weight (Gemma 4); RMSNorm only.
        clip_qkv: bound of the magnitude of each element of queries and keys, after their norms and before rotation, and
            of values (OLMoE); no bound if None.
        softmax_scale: factor of the attention scores; ``1 / sqrt(kv_channels)`` if None.
        window_size: ``(before, after)``: number of positions that a token sees on each side of itself; -1 means no
            bound. Mistral's window of ``w`` tokens is ``(w - 1, 0)``.
        windowed_layers: for each layer of the model, whether ``window_size`` bounds it; None means all layers.
        rotary_layers: for each layer of the model, whether it rotates queries and keys (SmolLM 3); None means all.
        rotary_interleaved: whether rotary pairs are elements ``2i`` and ``2i + 1``, not ``i`` and ``i + d/2``.
        global_heads: key-value heads, and width of all heads, of layers without a window; None for those of all layers.
        layer_scalar: whether each layer has a factor of its output, a buffer that is not trained (Gemma 4).
        gated_linear_unit: whether to multiply the activation by a second projection (SwiGLU with SiLU).
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        init_method_std: standard deviation of new weights.
        experts: experts instead of the MLP of some layers; None for none.
        latent: multi-head latent attention (DeepSeek), whose heads are ``latent.head_width`` wide; None for ordinary
            attention.
        activation_func: elementwise function of the MLP.
        add_bias_linear: whether the linear layers of the MLP have biases.
        attention_bias: whether attention's output projection has a bias; ``add_bias_linear`` if None.
        add_qkv_bias: whether the query-key-value projection has a bias even if the output projection has none; set to
            True if that has one.

    The fields of ``ModelFields`` are included.
    """

    num_layers: int = 0
    hidden_size: int = 0
    num_attention_heads: int = 0
    num_query_groups: int | None = None
    ffn_hidden_size: int | None = None
    kv_channels: int | None = None
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    softmax_scale: float | None = None
    window_size: tuple[int, int] | None = None
    windowed_layers: Sequence[bool] | None = None
    rotary_layers: Sequence[bool] | None = None
    rotary_interleaved: bool = False
    gated_linear_unit: bool = False
    normalization: Normalization = "LayerNorm"
    norm_position: NormPosition = "pre"
    layernorm_epsilon: float = 1e-5
    layernorm_zero_centered_gamma: bool = False
    embedding_layernorm: bool = False
    final_layernorm: bool = True
    qk_layernorm: bool = False
    qk_layernorm_over_heads: bool = False
    value_layernorm: bool = False
    clip_qkv: float | None = None
    apply_residual_connection_post_layernorm: bool = False
    parallel_residual: bool = False
    residual_multiplier: float = 1.0
    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    final_logit_softcap: float | None = None
    attention_logit_softcap: float | None = None
    attention_sinks: bool = False
    init_method_std: float = 0.02
    experts: Experts | None = None
    latent: LatentAttention | None = None
    global_heads: GlobalHeads | None = None
    layer_scalar: bool = False
    activation_func: Callable[[Tensor], Tensor] = F.gelu
    add_bias_linear: bool = True
    attention_bias: bool | None = None
    add_qkv_bias: bool = False

    @property
    def heads(self) -> Heads:
        """Number of query heads and key-value heads, and the width of a head; known after ``__post_init__``."""
        assert self.num_query_groups is not None
        assert self.kv_channels is not None
        return Heads(self.num_attention_heads, self.num_query_groups, self.kv_channels)

    def heads_of(self, layer_number: int) -> Heads:
        """Return ``heads``, or with ``global_heads`` those of the layer ``layer_number``, from 1."""
        if self.global_heads is None or self.windows(layer_number):
            return self.heads
        return Heads(self.num_attention_heads, self.global_heads.groups, self.global_heads.width)

    def keys_are_values(self, layer_number: int) -> bool:
        """Return whether values of the layer ``layer_number``, from 1, are its keys before norm and rotation."""
        return self.global_heads is not None and self.global_heads.keys_are_values and not self.windows(layer_number)

    @property
    def kinds_of_heads(self) -> frozenset[Heads]:
        """The heads of all layers."""
        return frozenset(map(self.heads_of, range(1, self.num_layers + 1)))

    @property
    def value_width(self) -> int:
        """Width of a head's value."""
        return self.heads.width if self.latent is None else self.latent.value_width

    @property
    def rotary_width(self) -> int:
        """Width of the part of a head that is rotated, if ``rotary_percent`` of a model is 1."""
        return self.heads.width if self.latent is None else self.latent.rotary_width

    def differences(self, other: TransformerFields) -> dict[str, tuple[Any, Any]]:
        """Return the fields in which two models differ outside of training, with this one's value and the other's.

        Dropout and initial values are not compared, and ``max_sequence_length`` only if one of them has learned
        positions.
        """
        skipped = {"hidden_dropout", "attention_dropout", "init_method_std"}
        if "learned_absolute" not in (self.position_embedding_type, other.position_embedding_type):
            skipped.add("max_sequence_length")
        if self.kind == other.kind == "gpt":
            skipped |= {"num_tokentypes", "add_binary_head", "add_lm_head"}
        return {
            spec.name: (mine, theirs)
            for spec in fields(TransformerFields)
            if spec.name not in skipped and (mine := getattr(self, spec.name)) != (theirs := getattr(other, spec.name))
        }

    @property
    def num_experts(self) -> int:
        """Number of experts of a layer that has some; 0 for none."""
        return 0 if self.experts is None else self.experts.num

    def windows(self, layer_number: int) -> bool:
        """Return whether ``window_size`` bounds the layer ``layer_number``, from 1."""
        if self.window_size is None:
            return False
        return self.windowed_layers is None or self.windowed_layers[layer_number - 1]

    def rotates(self, layer_number: int) -> bool:
        """Return whether the layer ``layer_number``, from 1, rotates queries and keys, in a model with RoPE."""
        return self.rotary_layers is None or self.rotary_layers[layer_number - 1]
