"""The command line. A dataclass per command defines its arguments and its work; ``main`` finds the dataclass."""
