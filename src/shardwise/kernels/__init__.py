"""Kernels: each next to its plain PyTorch reference, and one place that chooses (``dispatch``)."""
