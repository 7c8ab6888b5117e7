"""Megatron's language models: the engine's models, made from Megatron's configs and groups."""
