"""The layers of ``mpu``: those of ``tensor_parallel``, made without a config, with the options and defaults of old."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import init

from shardwise.core.errors import ConfigError
from shardwise.core.initialization import InitMethod
from shardwise.megatron.core import tensor_parallel
from shardwise.megatron.core.tensor_parallel import layers
from shardwise.megatron.core.tensor_parallel.attributes import _initialize_affine_weight_cpu
from shardwise.megatron.core.transformer.transformer_config import ModelParallelConfig
from shardwise.megatron.surface import given, offer


class _Pair(NamedTuple):
    output: Tensor
    bias: None = None


class LayerOutput(_Pair):
    """The result of a layer that adds its bias: the pair of its output and None, which also serves as the output.

    Layers of ``mpu`` return pairs, those of Megatron's first release tensors, and programs are written for either. It
    unpacks and indexes as the pair; functions and operators of PyTorch, and attributes of tensors that tuples lack, use
    the output.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return function(*_outputs(args), **{name: _outputs(value) for name, value in (kwargs or {}).items()})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self[0], name)


def _outputs(value: Any) -> Any:
    """``value`` with outputs instead of pairs, those in lists and tuples too."""
    if isinstance(value, LayerOutput):
        return value[0]
    return type(value)(map(_outputs, value)) if type(value) in (list, tuple) else value


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: LayerOutput, *others: Any) -> Any:
        return getattr(self[0], name)(*others)

    return operate


# Its name in Megatron's first release.
_initialize_affine_weight = _initialize_affine_weight_cpu

for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "rmatmul", "pow", "neg"):
    setattr(LayerOutput, f"__{_name}__", _operator(f"__{_name}__"))


# Arguments that later releases do not have, or take by name.
_OWN = ("config", "options", "moe", "enable_expert_tensor_parallelism")


class VocabParallelEmbedding(tensor_parallel.VocabParallelEmbedding):
    """``tensor_parallel.VocabParallelEmbedding``, made without a config: fp32 if ``config`` is None.

    ``options`` are the other arguments of the base class.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        init_method: InitMethod = init.xavier_normal_,
        *,
        config: ModelParallelConfig | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**given(locals(), but=_OWN), config=config or ModelParallelConfig(), **options)


class ColumnParallelLinear(tensor_parallel.ColumnParallelLinear):
    """``tensor_parallel.ColumnParallelLinear``, made without a config; by default it gathers its output.

    ``forward`` returns the output and the bias with ``skip_bias_add``, else a ``LayerOutput``.

    Args:
        moe: the layer is part of an expert, which the ranks do not split.
        enable_expert_tensor_parallelism: the ranks split experts too.
        config: dtype and initialisation; fp32 if None.
        options: the other arguments of the base class, which also describes those by position.

    Raises:
        ConfigError: ``moe`` without ``enable_expert_tensor_parallelism``, on several ranks.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        init_method: InitMethod = init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        moe: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        *,
        config: ModelParallelConfig | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**given(locals(), but=_OWN), config=config or ModelParallelConfig(), **options)
        self.is_expert_without_slicing = _is_whole(moe and not enable_expert_tensor_parallelism, self.tp_size)

    def forward(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]  # A pair.
        """``tensor_parallel.ColumnParallelLinear.forward``."""
        return _result(*super().forward(*args, **options), skip_bias_add=self.skip_bias_add)


class RowParallelLinear(tensor_parallel.RowParallelLinear):
    """``tensor_parallel.RowParallelLinear``, made without a config; by default it splits its input.

    The result of ``forward``, the other arguments and the errors are those of ``ColumnParallelLinear``.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        init_method: InitMethod = init.xavier_normal_,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        moe: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        *,
        config: ModelParallelConfig | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**given(locals(), but=_OWN), config=config or ModelParallelConfig(), **options)
        self.is_expert_without_slicing = _is_whole(moe and not enable_expert_tensor_parallelism, self.tp_size)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]  # A pair.
        """``tensor_parallel.RowParallelLinear.forward``."""
        return _result(*super().forward(input_), skip_bias_add=self.skip_bias_add)


def _is_whole(is_whole: bool, num_ranks: int) -> bool:
    """Whether an expert is not split; an error where there are ranks that would split it."""
    if is_whole and num_ranks > 1:
        raise ConfigError(
            f"moe=True keeps a layer whole on each of the {num_ranks} ranks, and this layer splits; set "
            "enable_expert_tensor_parallelism=True, or use torch.nn.Linear"
        )
    return is_whole


def _result(output: Tensor, bias: Tensor | None, *, skip_bias_add: bool) -> tuple[Tensor, Tensor | None]:
    return (output, bias) if skip_bias_add else LayerOutput(output)


def __getattr__(name: str) -> Any:
    # The functions are those of tensor_parallel.
    return getattr(layers, name)


offer(globals(), layers)
