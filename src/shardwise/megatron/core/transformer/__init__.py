"""Parts of Megatron's transformer."""
