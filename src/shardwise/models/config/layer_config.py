"""How the layers of a model are made, and where their gradients go."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from shardwise.core.errors import ConfigError


@dataclass
class LayerConfig:
    """How layers are made, computed and split into stages, whatever the model.

    Attributes:
        params_dtype: dtype of the parameters.
        sequence_parallel: keep what lies between tensor-parallel regions split along the sequence (Korthikanti et al.
            2022); the activations there take 1/t of the memory. On one rank there is nothing to split.
        tp_comm_overlap: with ``sequence_parallel`` multiply what ranks gather as it arrives, and send what they sum as
            it is made: the same numbers, and more of the communication beside products
            (``core.communication.overlap``).
        perform_initialization: give weights their initial values when made.
        use_cpu_initialization: draw initial values on the CPU, so that they do not depend on the device.
        deterministic_mode: choose operations whose result does not depend on the order of threads.
        gradient_accumulation_fusion: add weight gradients straight into ``weight.main_grad``.
        delay_wgrad_compute: leave the weight gradients of linear layers out of the backward pass, until the layer's
            ``backward_dw`` is called; a zero-bubble pipeline schedule needs it and calls it.
        defer_embedding_wgrad_compute: keep the output layer's inputs and output gradients, and compute its weight
            gradient after the last micro-batch.
        wgrad_deferral_limit: number of micro-batches that are kept for it; 0 is no limit.
        pipeline_model_parallel_size: number of pipeline stages.
        exact_parts: let results have the same bits at every number of tensor-parallel ranks and stages, and with
            ``training.gradients.GradientTrees`` of data-parallel ranks: what is summed is cut into so many parts, a
            power of two. The model's tensor-parallel group then sums so (``core.communication.trees``). None leaves
            sums to the libraries.
        virtual_pipeline_model_parallel_size: parts of the model that each stage holds, interleaved; needs
            ``pipeline_model_parallel_size`` over 1.

    Raises:
        ConfigError: a value out of range, or two that contradict each other.
    """

    params_dtype: torch.dtype = torch.float32
    sequence_parallel: bool = False
    tp_comm_overlap: bool = False
    perform_initialization: bool = True
    use_cpu_initialization: bool = False
    deterministic_mode: bool = False
    gradient_accumulation_fusion: bool = False
    delay_wgrad_compute: bool = False
    defer_embedding_wgrad_compute: bool = False
    wgrad_deferral_limit: int = 0
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    exact_parts: int | None = None

    def __post_init__(self) -> None:
        check_integers(self)
        for spec in fields(self):
            if spec.name.endswith("_parallel_size"):
                size = getattr(self, spec.name)
                if size is not None and size < 1:
                    raise ConfigError(f"{spec.name} is {size}; it must be at least 1")
        if self.virtual_pipeline_model_parallel_size is not None and self.pipeline_model_parallel_size == 1:
            raise ConfigError(
                f"virtual_pipeline_model_parallel_size is {self.virtual_pipeline_model_parallel_size} and "
                "pipeline_model_parallel_size is 1; interleaving needs at least 2 stages"
            )
        if self.wgrad_deferral_limit < 0:
            raise ConfigError(f"wgrad_deferral_limit is {self.wgrad_deferral_limit}; it must be at least 0 (no limit)")


def check_integers(config: Any) -> None:
    """Raise ConfigError for a field of a dataclass that is for integers and has a float.

    Later it would fail in a layer, or not at all (8.0 == 8).
    """
    for spec in fields(config):
        # Annotations are strings in some modules, and types in others.
        if spec.type in ("int", "int | None", int, int | None) and isinstance(getattr(config, spec.name), float):
            raise ConfigError(f"{spec.name} is {getattr(config, spec.name)!r}; it must be an integer")
