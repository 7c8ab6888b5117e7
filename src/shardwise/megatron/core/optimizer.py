"""Names of Megatron's optimizers; use PyTorch's optimizers or ``shardwise.training.optimizer`` instead."""

from shardwise.megatron.absent import absent_names

__getattr__ = absent_names("optimizer")
