"""Megatron's language models: the engine's, made from its configs and on its groups."""
