"""Settings of runs that go beyond those of training: fine-tuning, adapters, preferences, teachers, plans."""
