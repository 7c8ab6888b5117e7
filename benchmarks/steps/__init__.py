"""One training step of one model, in every way that `train_step.py` compares."""
