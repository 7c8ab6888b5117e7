"""Training: settings, trainer, objective, gradients, optimizers and the pipeline."""
