"""The two tensor-parallel blocks, in all implementations that `tp_block.py` compares."""
