"""Megatron Core's modules, at its paths."""
