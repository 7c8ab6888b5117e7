"""Kernels: each beside its plain PyTorch reference, and one place that chooses (``dispatch``)."""
