"""Models on disk: sharded checkpoints, Hugging Face folders, and adapter files."""
