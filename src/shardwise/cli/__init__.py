"""The command line: one small module per command, whose dataclass is its arguments; ``main`` finds it."""
