"""The loss over a split vocabulary, in every way that `loss.py` compares."""
