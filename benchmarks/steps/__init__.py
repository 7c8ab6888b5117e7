"""A training step of one model, in all implementations that `train_step.py` compares."""
