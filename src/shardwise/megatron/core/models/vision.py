"""Megatron's base of vision models, and the projection of their features to a language model's hidden size."""

from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from shardwise.core.errors import ConfigError
from shardwise.megatron.core.process_groups_config import _group_of
from shardwise.megatron.core.tensor_parallel import ColumnParallelLinear
from shardwise.megatron.core.transformer.layer_parts import MLP, MLPSubmodules, _check_part
from shardwise.megatron.core.transformer.module import MegatronModule
from shardwise.megatron.core.transformer.transformer_config import TransformerConfig
from shardwise.megatron.surface import offer


class VisionModule(MegatronModule):
    """Base class of a program's own vision models."""


class MultimodalProjector(MegatronModule):
    """A layer from features of another width to the hidden size.

    Args:
        config: hidden size, and activation and width of an MLP.
        submodules: parts of an MLP, of which "affine" has the first.
        projector_type: "mlp" or "affine", one linear layer.
        input_size: number of input features.
        tp_group: tensor-parallel group; None means the ambient topology's.

    Attributes:
        encoder: the ``MLP`` or ``ColumnParallelLinear``.

    Raises:
        ConfigError: another ``projector_type``, or other parts.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        projector_type: str,
        input_size: int,
        tp_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(config)
        self.projector_type = projector_type
        self.encoder: Any
        if projector_type == "mlp":
            self.encoder = MLP(config, submodules, input_size=input_size, tp_group=tp_group)
        elif projector_type == "affine":
            _check_part(submodules, "linear_fc1", ColumnParallelLinear)
            assert config.init_method is not None
            self.encoder = ColumnParallelLinear(
                input_size,
                config.hidden_size,
                config=config,
                init_method=config.init_method,
                gather_output=True,
                bias=config.add_bias_linear,
                tp_group=_group_of(None, "tp") if tp_group is None else tp_group,
            )
        else:
            raise ConfigError(f"projector_type is {projector_type!r}; it must be 'mlp' or 'affine'")

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map ``[..., i]`` to ``[..., h]``, bias included."""
        output, bias = self.encoder(hidden_states)
        result: Tensor = output if bias is None else output + bias
        return result


offer(globals())
