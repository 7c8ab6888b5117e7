"""The base of GPT and BERT: embedding, transformer block and output layer, or one pipeline stage of them."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shardwise.core.errors import ConfigError, ShardingError
from shardwise.core.initialization import draw_seed, part_seeded
from shardwise.core.sequence_view import SequenceView
from shardwise.core.topology import Groups
from shardwise.core.typed import computed_locally
from shardwise.models.config import ModelConfig
from shardwise.models.experts.router import Reroute, RoutedBatch
from shardwise.models.language_model import LanguageModel
from shardwise.models.model_fields import ModelFields, PositionEmbedding
from shardwise.models.model_input import ModelInput
from shardwise.models.token_embedding import TokenEmbedding, losses_at, places_learned, tokens_at
from shardwise.models.transformer.block import TransformerBlock, layers_of_this_stage
from shardwise.models.transformer.context_attention import check_way
from shardwise.models.transformer.core_attention import RowCache
from shardwise.models.transformer.distance_bias import local_alibi_slopes
from shardwise.models.transformer.layer import TransformerLayerSpec
from shardwise.models.transformer.mlp import layer_arguments, softcap
from shardwise.models.transformer.rotary import FixedTensors, RotaryEmbedding, RotaryScaling, on_default_device
from shardwise.nn import ColumnLinear, parameter_device, viewless
from shardwise.nn.weight_gradient import WeightGradientQueue

_POSITIONS = get_args(PositionEmbedding)


class _TakenApart(Function):
    """Identity of a weight. Its backward passes the gradient to ``take(weight, gradient)`` instead of autograd."""

    spmd_typecheck = computed_locally("weight")

    @staticmethod
    def forward(ctx: Any, weight: Tensor, take: Callable[[Tensor, Tensor], None]) -> Tensor:
        ctx.weight, ctx.take = weight, take
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.take(ctx.weight, grad)
        return None, None


class TransformerModel(FixedTensors, LanguageModel):
    """Embedding (``pre_process``), this stage's layers, and output layer (``post_process``).

    The initial values of each part depend only on the part and on the state of the default generator, which must be the
    same on every rank. So initial values, and the generator's state afterwards, are the same for any number of ranks
    and stages.

    Args:
        config, vocab_size, max_sequence_length, groups and others: see ``GPT``.
        rotary_percent, rotary_base, rope_scaling: see ``RotaryEmbedding``.
        window_rotary_base: base for layers with a window, whose frequencies are then not scaled (Gemma 3); None means
            the base and scaling of other layers.

    Raises:
        ConfigError: a size or an option is out of range.
        TopologyError: a process group that the stages need is missing or has the wrong ranks.
    """

    # Name of the attribute that holds the transformer block.
    block_name: str
    _fixed = ("alibi_slopes",)
    vocab_size: int
    max_sequence_length: int
    position_embedding_type: PositionEmbedding
    rotary_percent: float
    rotary_base: float
    rope_scaling: RotaryScaling | None
    window_rotary_base: float | None
    position_offset: int
    positions_skip_padding: bool
    # A model for which another value holds sets it before it calls the base constructor.
    num_tokentypes = 0
    _output_bias = False
    _scatters_embedding = True
    output_layer: ColumnLinear

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int | None = None,
        max_sequence_length: int | None = None,
        *,
        groups: Groups,
        layer_spec: TransformerLayerSpec | None = None,
        pre_process: bool = True,
        post_process: bool = True,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool | None = None,
        position_embedding_type: PositionEmbedding | None = None,
        rotary_percent: float | None = None,
        rotary_base: float | None = None,
        rope_scaling: RotaryScaling | None = None,
        window_rotary_base: float | None = None,
        position_offset: int | None = None,
        positions_skip_padding: bool | None = None,
        vp_stage: int | None = None,
    ) -> None:
        arguments = locals()
        super().__init__(config, groups)
        # Arguments that are not None replace the config's fields.
        for name in arguments.keys() & {spec.name for spec in dataclasses.fields(ModelFields)}:
            setattr(self, name, getattr(config, name) if arguments[name] is None else arguments[name])
        # Megatron passes False for none.
        self.rope_scaling = self.rope_scaling or None
        check_way(config, groups.tp.size(), groups.data.ranks_of_sample)
        self._check()
        if config.sequence_parallel and groups.tp.size() == 1:
            # A sequence is not split over one rank.
            self.config = config = dataclasses.replace(config, sequence_parallel=False)
        self.pre_process = pre_process
        self.post_process = post_process
        self.parallel_output = parallel_output
        self.sequence_parallel = config.sequence_parallel
        self.vp_stage = vp_stage
        self._check_stages()
        self._input_tensor: Tensor | None = None
        self.rerouting: Callable[[SequenceView, int, Tensor | None], Reroute] | None = None
        layers = layers_of_this_stage(config, self.pp_group, vp_stage)
        device = parameter_device(self.tp_group, on_cpu=config.use_cpu_initialization)
        starts = config.perform_initialization and torch.get_default_device().type != "meta"
        self._seed = draw_seed() if starts else None
        if pre_process:
            with self._seeded("embedding"):
                self.embedding = TokenEmbedding(
                    config,
                    self.vocab_size,
                    self.max_sequence_length,
                    self.position_embedding_type,
                    self.num_tokentypes,
                    self._scatters_embedding,
                    tp_group=self.tp_group,
                    position_offset=self.position_offset,
                )
        self.rotary: RotaryEmbedding | None = None
        self.window_rotary: RotaryEmbedding | None = None
        if self.position_embedding_type == "rope":
            width, percent = config.rotary_width, self.rotary_percent
            full = width if config.global_heads is None else config.global_heads.width
            with device:
                self.rotary = RotaryEmbedding(full, percent, self.rotary_base, self.rope_scaling)
                if self.window_rotary_base is not None:
                    self.window_rotary = RotaryEmbedding(width, percent, self.window_rotary_base)
        self.alibi_slopes: Tensor | None = None
        if self.position_embedding_type == "alibi":
            with device:
                self.alibi_slopes = on_default_device(local_alibi_slopes(config, self.tp_group))
            self._attention_is_masked = True
            self._check_attention_backend()
        block = TransformerBlock(
            config,
            layer_spec or TransformerLayerSpec(),
            self.tp_group,
            layers=layers,
            post_process=post_process,
            seed=self._seed,
            groups=groups,
        )
        self.add_module(self.block_name, block)
        self.output_queue: WeightGradientQueue | None = None
        if config.defer_embedding_wgrad_compute and post_process:
            self.output_queue = WeightGradientQueue(limit=config.wgrad_deferral_limit, inputs=[])
        if post_process:
            with self._seeded("output_layer"):
                self.output_layer = self._make_output_layer(self.vocab_size, self._output_bias)
            self._make_heads()
        self._setup_embeddings()

    def _make_heads(self) -> None:
        """Hook for subclasses that create heads in addition to the output layer."""

    def _make_output_layer(self, vocab_size: int, bias: bool) -> ColumnLinear:
        return ColumnLinear(
            self.config.hidden_size,
            vocab_size,
            bias,
            init=self.config.init_method,
            own_weight=not (self.pre_process and self.share_embeddings_and_output_weights),
            weight_gradient_queue=self.output_queue,
            align_rows=True,
            **layer_arguments(self.config, group=self.tp_group),
        )

    def _logits(self, hidden: Tensor, sequence: SequenceView) -> Tensor:
        """Map ``[s, b, h]``, or this rank's shard, to ``[s, b, v/t]`` (``[s, b, v]`` without ``parallel_output``)."""
        logits: Tensor = self.output_layer(hidden, self._output_weight(), sequence=sequence)
        logits = self._scaled(logits)
        return viewless(logits if self.parallel_output else self.output_layer.gather(logits))

    def _loss(self, hidden: Tensor, labels: Tensor, sequence: SequenceView) -> Tensor:
        """Map ``[s, b, h]``, or this rank's shard, and labels ``[b, s]`` to the loss of each token ``[b, s]``."""
        weight = self._output_weight()
        shape, places = labels.shape, None
        # With sequence parallelism a rank has only its own tokens.
        if not self.sequence_parallel:
            places = self._arithmetic.tokens_of_loss(lambda: places_learned(labels, self.vocab_size))
        if places is not None:
            hidden, labels = tokens_at(places, hidden, labels)
            sequence = SequenceView(len(places))
        if not self.fuses_output_layer_and_loss:
            logits = self.output_layer(hidden, weight, sequence=sequence)
            is_scaled = self._arithmetic.scales_before_loss()
            # Only the loss reads these logits, so their gradient may overwrite them.
            losses = self.loss_of_logits(
                labels, self._scaled(logits) if is_scaled else logits, inplace_=True, is_scaled=is_scaled
            )
        else:
            weight = self.output_layer.weight if weight is None else weight
            assert weight is not None
            bias = self.output_layer.bias
            losses = self.loss_of_hidden(hidden, labels, weight, bias=bias, sequence_parallel=self.sequence_parallel)
        return losses if places is None else losses_at(places, losses, shape)

    def _scaled(self, logits: Tensor) -> Tensor:
        cap, scaling = self.config.final_logit_softcap, self.config.logits_scaling
        if cap is not None:
            logits = self._arithmetic.activation(partial(softcap, cap=cap), logits)
        return logits if scaling == 1.0 else logits / scaling

    def _output_weight(self) -> Tensor | None:
        """Return the tied weight; ``GradientTrees`` may take this use's gradient separately. None if not tied."""
        weight: Any = self.shared_embedding_or_output_weight()
        take = getattr(weight, "take_output_gradient", None)
        # A layer that delays its weight gradient passes it on later.
        delays = self.config.delay_wgrad_compute
        if take is None or delays or not (self.pre_process and self.post_process and torch.is_grad_enabled()):
            shared: Tensor | None = weight
            return shared
        apart: Tensor = _TakenApart.apply(weight, take)
        return apart

    def finish_weight_gradients(self) -> None:
        """Compute the output layer's deferred weight gradients (``config.defer_embedding_wgrad_compute``).

        Call it after the last backward of a step. Collective over the tensor-parallel group with sequence parallelism.
        """
        if self.output_queue is not None:
            self.output_queue.take(
                fuse=self.config.gradient_accumulation_fusion,
                gather_group=self.tp_group if self.sequence_parallel else None,
            )()

    def _check(self) -> None:
        position_embedding_type = self.position_embedding_type
        if self.vocab_size < self.tp_group.size() or self.max_sequence_length < 1:
            raise ConfigError(
                f"vocab_size {self.vocab_size} must be at least the {self.tp_group.size()} tensor-parallel ranks, and "
                f"max_sequence_length {self.max_sequence_length} at least 1"
            )
        if position_embedding_type not in _POSITIONS:
            raise ConfigError(
                f"position_embedding_type is {position_embedding_type!r}; it must be one of {', '.join(_POSITIONS)}"
            )
        if self.rope_scaling is not None and not isinstance(self.rope_scaling, RotaryScaling):
            raise ConfigError(
                f"rope_scaling is {self.rope_scaling!r}; it must be a "
                'shardwise.models.transformer.rotary.RotaryScaling, such as RotaryScaling("linear", 2.0), or None'
            )
        for name in ("rope_scaling", "window_rotary_base"):
            if getattr(self, name) is not None and position_embedding_type != "rope":
                raise ConfigError(
                    f"{name} is given, and position_embedding_type is {position_embedding_type!r}; leave it out, or "
                    "use 'rope'"
                )

    def _check_stages(self) -> None:
        num_stages, experts = self.groups.num_stages, self.config.experts
        if num_stages > 1 and experts is not None and experts.pools_layers:
            raise ConfigError(
                f"experts.pools_layers is for layers on one stage, and there are {num_stages} pipeline stages; use one "
                'stage, or leave it at False ("output_router_logits": false in the config.json of a folder)'
            )
        is_whole = self.pre_process and self.post_process
        if num_stages > 1 and self.config.pipeline_model_parallel_size == 1 and not is_whole:
            raise ConfigError(
                f"pipeline_model_parallel_size is 1, and the model is one of {num_stages} stages (pre_process="
                f"{self.pre_process}, post_process={self.post_process}); set it to {num_stages}"
            )

    @property
    def block(self) -> TransformerBlock:
        """This stage's layers."""
        block = self.get_submodule(self.block_name)
        assert isinstance(block, TransformerBlock)
        return block

    def _seeded(self, part: str) -> AbstractContextManager[None]:
        return part_seeded(self._seed, part)

    def _setup_embeddings(self) -> None:
        if self.pre_process or self.post_process:
            self.setup_tied_weight()

    def reset_parameters(self) -> None:
        """Set all parameters to their initial values. Collective if the constructor is, for tied weights over stages.

        A model on the meta device is first allocated on the device of a new model (call ``to_empty`` before for another
        device). The values are those of a new model on that device, given the same state of the generator.
        """
        if any(param.is_meta for param in self.parameters()):
            self.to_empty(device=parameter_device(self.tp_group, on_cpu=self.config.use_cpu_initialization))
        self._seed = draw_seed()
        for part, module in self._parts():
            with part_seeded(self._seed, *part):
                for child in module.modules():
                    reset: Any = getattr(child, "reset_parameters", None)
                    if reset is not None:
                        reset()
        self._setup_embeddings()

    def _parts(self) -> Iterator[tuple[tuple[object, ...], nn.Module]]:
        """Yield each part of the model that has a separate seed, after the values that are mixed into its seed."""
        for name, child in self.named_children():
            if not isinstance(child, TransformerBlock):
                yield (name,), child
                continue
            yield from child.seeded_parts()
            if child.final_layernorm is not None:
                yield (name,), child.final_layernorm

    def set_input_tensor(self, input_tensor: Tensor | Sequence[Tensor | None] | None) -> None:
        """Set the input of the following forwards: the hidden states of the previous stage, or None on the first stage.

        They are ``[s, b, h]`` (this rank's shard with sequence parallelism), as a tensor or a list of one tensor.

        Raises:
            ShardingError: the list does not have exactly one tensor.
        """
        if isinstance(input_tensor, Sequence):
            if len(input_tensor) != 1:
                raise ShardingError(f"a stage has one input tensor, and {len(input_tensor)} are given")
            input_tensor = input_tensor[0]
        self._input_tensor = input_tensor

    @property
    def depends_on_length(self) -> bool:
        """True if the rotary frequencies depend on the text length."""
        return self.rotary is not None and self.rotary.depends_on_length

    @property
    def needs_lengths(self) -> bool:
        """True if training reads the lengths of texts: for rotary frequencies, or for experts, which skip padding."""
        return self.depends_on_length or self.config.experts is not None

    def _for_layers(self, batch: ModelInput, hidden: Tensor, *, counts_tokens: bool = False) -> dict[str, Any]:
        """Return the keyword arguments of layers; ``counts_tokens`` is that of ``ModelInput.attention_mask``."""
        context, device = batch.view.context, hidden.device
        lengths = batch.text_lengths(device) if self.depends_on_length else None

        def of_rank(tensor: Tensor) -> Tensor:
            return tensor if context is None else context.own(tensor, dim=0)

        def tables(rotary: RotaryEmbedding | None) -> tuple[Tensor, Tensor] | None:
            if rotary is None:
                return None
            cos, sin = rotary.tables(batch.positions, batch.view.whole_length, hidden, lengths)
            return of_rank(cos), of_rank(sin)

        arguments: dict[str, Any] = {
            "attention_mask": batch.attention_mask(self.alibi_slopes, counts_tokens=counts_tokens),
            "cache": batch.cache,
            "sequence": batch.view,
            "rotary": tables(self.rotary),
        }
        if self.window_rotary is not None:
            arguments["window_rotary"] = tables(self.window_rotary)
        if self.rotary is not None:
            scale = self.rotary.query_scale(batch.positions, batch.view.whole_length, hidden)
            if scale is not None:
                arguments["query_scale"] = of_rank(scale)
        experts = self.config.experts
        if experts is not None and batch.cache is None:
            begin = self.rerouting if self.training else None
            arguments["batch"] = RoutedBatch(
                batch.view,
                batch.known_tokens(device),
                choices=[] if experts.pools_layers else None,
                reroute=None if begin is None else begin(batch.view, batch.num_samples, batch.ids),
            )
        return arguments

    def _hidden_of(self, batch: ModelInput, *tokentype_ids: Tensor | None) -> Tensor:
        """Return the embedding of a batch, or the input of a later stage."""
        if not self.pre_process:
            received, own = self._input_of_a_later_stage(), (batch.view.size, batch.num_samples)
            if batch.cache is None and received.shape[:2] != own:
                raise ShardingError(
                    f"this stage was sent hidden states of shape {list(received.shape)}, and its own input_ids "
                    f"make [{own[0]}, {own[1]}, {self.config.hidden_size}]; give all stages the same micro-batch"
                )
            return received
        context, is_ragged = batch.view.context, isinstance(batch.cache, RowCache)
        hidden: Tensor = self.embedding(
            batch.ids, batch.positions, *tokentype_ids, context=context, is_ragged=is_ragged
        )
        return hidden

    def _num_samples(self, input_ids: Tensor | None, hidden: Tensor | None = None) -> int:
        if input_ids is not None:
            return input_ids.size(0)
        return (self._input_of_a_later_stage() if hidden is None else hidden).size(1)

    def _input_of_a_later_stage(self) -> Tensor:
        if self._input_tensor is None:
            if self.pre_process:
                raise ShardingError("input_ids is None; pass the tokens, a tensor [b, s]")
            raise ShardingError("this stage has no embedding (pre_process=False); call set_input_tensor before forward")
        return self._input_tensor

    def _sequence_of(self, *of_tokens: Tensor | None, hidden: Tensor | None = None) -> SequenceView:
        """Return the view of hidden states, as long as the first given ``[s]`` or ``[b, s]``, or ``[s, b, h]``."""
        group = self.tp_group if self.sequence_parallel else None
        for tensor in of_tokens:
            if tensor is not None:
                return self.view_of(tensor.size(-1))
        hidden = self._input_of_a_later_stage() if hidden is None else hidden
        if group is not None or self.splits_context:
            raise ShardingError(
                "with sequence or context parallelism a stage cannot tell the sequence's length; pass input_ids"
            )
        return SequenceView(hidden.size(0))
