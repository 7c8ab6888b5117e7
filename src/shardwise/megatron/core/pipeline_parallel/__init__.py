"""Megatron's pipeline parallelism."""
