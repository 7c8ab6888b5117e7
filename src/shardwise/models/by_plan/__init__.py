"""Tensor parallelism of a model of transformers by the model's own plan."""
