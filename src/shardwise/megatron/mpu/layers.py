"""The layers of ``mpu``: the layers of ``tensor_parallel`` without a config, with the older options and defaults."""

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
    """Result of a layer that adds its bias: the pair of output and None, which can also be used as the output tensor.

    ``mpu``'s layers return pairs, but in Megatron's first release they returned tensors; programs exist for both. The
    result unpacks and indexes like the pair. PyTorch's functions and operators, and attributes that tuples lack, apply
    to the output.
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
    """Replace pairs by their outputs in ``value``, also in lists and tuples."""
    if isinstance(value, LayerOutput):
        return value[0]
    return type(value)(map(_outputs, value)) if type(value) in (list, tuple) else value


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: LayerOutput, *others: Any) -> Any:
        return getattr(self[0], name)(*others)

    return operate


# The name in Megatron's first release.
_initialize_affine_weight = _initialize_affine_weight_cpu

for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "rmatmul", "pow", "neg"):
    setattr(LayerOutput, f"__{_name}__", _operator(f"__{_name}__"))


# Arguments that later releases lack, or take by name.
_OWN = ("config", "options", "moe", "enable_expert_tensor_parallelism")


class VocabParallelEmbedding(tensor_parallel.VocabParallelEmbedding):
    """``tensor_parallel.VocabParallelEmbedding`` that needs no config; fp32 if ``config`` is None.

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
    """``tensor_parallel.ColumnParallelLinear`` that needs no config; by default it gathers its output.

    ``forward`` returns the output and the bias with ``skip_bias_add``, otherwise a ``LayerOutput``.

    Args:
        moe: whether the layer is part of an expert, which the ranks do not split.
        enable_expert_tensor_parallelism: whether the ranks split experts too.
        config: dtype and initialisation; fp32 if None.
        options: other arguments of the base class, which also documents the positional arguments.

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
        """See ``tensor_parallel.ColumnParallelLinear.forward``."""
        return _result(*super().forward(*args, **options), skip_bias_add=self.skip_bias_add)


class RowParallelLinear(tensor_parallel.RowParallelLinear):
    """``tensor_parallel.RowParallelLinear`` that needs no config; by default it splits its input.

    The result of ``forward``, the other arguments and the errors are the same as in ``ColumnParallelLinear``.
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
        """See ``tensor_parallel.RowParallelLinear.forward``."""
        return _result(*super().forward(input_), skip_bias_add=self.skip_bias_add)


def _is_whole(is_whole: bool, num_ranks: int) -> bool:
    """Return ``is_whole``; raise ConfigError if it is True and several ranks would split the expert."""
    if is_whole and num_ranks > 1:
        raise ConfigError(
            f"moe=True keeps a layer whole on each of the {num_ranks} ranks, and this layer splits; set "
            "enable_expert_tensor_parallelism=True, or use torch.nn.Linear"
        )
    return is_whole


def _result(output: Tensor, bias: Tensor | None, *, skip_bias_add: bool) -> tuple[Tensor, Tensor | None]:
    return (output, bias) if skip_bias_add else LayerOutput(output)


def __getattr__(name: str) -> Any:
    # Functions come from tensor_parallel.
    return getattr(layers, name)


offer(globals(), layers)
