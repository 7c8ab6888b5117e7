"""Megatron's checkpoints, read as a folder of tensors under names of this library."""
