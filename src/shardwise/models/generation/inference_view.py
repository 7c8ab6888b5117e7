"""A trained model on layers for inference, without a copy of its weights."""

from typing import Literal, TypeVar

from shardwise.core.errors import ConfigError
from shardwise.models.gpt import GPT
from shardwise.models.transformer.inference_block import InferenceBlock
from shardwise.nn.inference import InferenceRowLinear, sharing
from shardwise.nn.linear import LinearParallelism

M = TypeVar("M", bound=GPT)


def inference_view(model: M, *, fused: bool) -> M:
    """The model that computes what ``model`` does in evaluation mode, without gradient, on layers for inference.

    It has the parameters that ``model`` has now, under the same names: what is written into them is seen by both. Take
    another after parameters were replaced, as by ``load_state_dict(assign=True)``.

    Args:
        model: left as it is.
        fused: one exchange per half block (``shardwise.nn.inference``), for models with sequence parallelism and
            without; on one rank there is nothing to fuse.

    Raises:
        ConfigError: layers with adapters, with parts of a program's own, not pre-norm; or with ``fused`` one of several
            pipeline stages, or no norm after the last layer.
    """
    return with_block(model, InferenceBlock.of(model.decoder, fused=fused))


def with_block(model: M, block: InferenceBlock) -> M:
    """The model with ``block``, which was made of its own, in place of that; ``inference_view`` otherwise."""
    if not block.fused:
        return sharing(model, type(model), decoder=block)
    # What the block returns is whole already.
    output_layer = sharing(
        model.output_layer, type(model.output_layer), parallelism=LinearParallelism.COLUMN, sequence_parallel=False
    )
    return sharing(model, type(model), decoder=block, output_layer=output_layer, sequence_parallel=False)


def on_layers(model: M, layers: Literal["auto", "training", "inference", "fused"]) -> tuple[M, str]:
    """The model on the layers that are asked for, and which they are, for people.

    Args:
        model: left as it is.
        layers: those of training; those for inference, with the same communication or ``"fused"``; or ``"auto"``, those
            for inference unfused where the model can have them. Of a model that is not split along the sequence these
            take the same collectives and fewer operations; fused on a CPU there are more operations.

    Raises:
        ConfigError: the model cannot have those that are asked for by name.
    """
    if layers == "training":
        return model, "those of training, as asked for"
    try:
        view = inference_view(model, fused=layers == "fused")
    except ConfigError as error:
        if layers != "auto":
            raise
        return model, f"those of training, since {error}"
    if layers == "auto":
        return view, "those for inference, which are faster than those of training"
    row = next(module for module in view.modules() if isinstance(module, InferenceRowLinear))
    return view, f"those for inference, as asked for; exchange of a half block: {row.exchange}"
