"""Fine-tuning steps with adapters: Shardwise's, and those of peft and transformers."""
