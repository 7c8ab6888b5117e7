"""Fine-tuning steps with adapters, of Shardwise and of peft and transformers."""
