"""``shardwise finetune``: from a Hugging Face folder to a fine-tuned one or its adapters, on any number of ranks."""

from __future__ import annotations

from shardwise.cli.arguments import parse_finetune_arguments
from shardwise.cli.train import start_run


def main(argv: list[str]) -> int:
    """Fine-tune, here if this process is a rank or the only one, else in ranks that this process starts.

    Args:
        argv: the arguments after ``finetune``.

    Returns:
        The exit code.

    Raises:
        ConfigError: a setting out of range, or that does not fit the number of ranks.
    """
    arguments = parse_finetune_arguments(argv)

    def body() -> None:
        # Late, because PyTorch takes seconds to import, and a wrong setting should not.
        from shardwise.training.finetune import finetune

        finetune(arguments.settings)

    return start_run("finetune", argv, arguments, body)
