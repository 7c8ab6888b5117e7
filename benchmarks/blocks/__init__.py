"""The two tensor-parallel blocks, in every way that `tp_block.py` compares."""
