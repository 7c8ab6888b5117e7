"""A trained model on layers for inference, without a copy of its weights."""

from __future__ import annotations

from typing import TypeVar

from shardwise.layers.inference import sharing
from shardwise.layers.linear import LinearParallelism
from shardwise.models.gpt import GPT
from shardwise.transformer.inference import InferenceBlock

M = TypeVar("M", bound=GPT)


def inference_view(model: M, *, fused: bool) -> M:
    """The model that computes what ``model`` does in evaluation mode, without gradient, on layers for inference.

    It has the parameters that ``model`` has now, under the same names: what is written into them is seen by both. Take
    another after parameters were replaced, as by ``load_state_dict(assign=True)``.

    Args:
        model: left as it is.
        fused: one exchange per half block (``shardwise.layers.inference``), for models with sequence parallelism and
            without; on one rank there is nothing to fuse.

    Raises:
        ConfigError: layers with adapters, with parts of a program's own, not pre-norm; or with ``fused`` one of several
            pipeline stages, or no norm after the last layer.
    """
    block = InferenceBlock.of(model.decoder, fused=fused)
    if not block.fused:
        return sharing(model, type(model), decoder=block)
    # What the block returns is whole already.
    output_layer = sharing(
        model.output_layer, type(model.output_layer), parallelism=LinearParallelism.COLUMN, sequence_parallel=False
    )
    return sharing(model, type(model), decoder=block, output_layer=output_layer, sequence_parallel=False)
