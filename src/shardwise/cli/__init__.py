"""The command line: one small module per command, each with ``main(argv) -> exit code``."""
