"""Models and checkpoints on disk: sharded checkpoints, Hugging Face folders, files of adapters."""
