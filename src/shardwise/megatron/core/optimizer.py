"""Megatron's optimizers by name; a program trains with PyTorch's, or with ``shardwise.training.optimizer``."""

from shardwise.megatron.absent import absent_names

__getattr__ = absent_names("optimizer")
