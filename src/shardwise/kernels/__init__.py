"""Kernels, each next to its plain PyTorch reference; ``dispatch`` chooses between them."""
