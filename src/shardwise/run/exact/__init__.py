"""The environment that exact runs fix, and trials of the operations that they rely on."""
