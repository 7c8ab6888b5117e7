"""What the programs that interpret kernels print."""

import json
import sys
import traceback


def print_failures(cases):
    """Call the function of each case; print as JSON, by the names, None or how it failed."""
    failures = {}
    for name, run in cases:
        try:
            run()
            failures[name] = None
        except Exception:
            failures[name] = traceback.format_exc(limit=-4)
    json.dump(failures, sys.stdout)
