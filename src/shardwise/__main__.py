"""Run the ``shardwise`` command as ``python -m shardwise``."""

import sys

if __name__ == "__main__":
    try:
        from shardwise.cli.main import main

        code = main()
    except KeyboardInterrupt:  # Ctrl-C while Python was still importing.
        code = 130
    sys.exit(code)
