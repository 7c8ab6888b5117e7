"""Megatron Core's modules, at Megatron's paths."""
