"""The parts of Megatron's transformer."""
