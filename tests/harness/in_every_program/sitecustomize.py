"""Python imports this at its start, in every program that ``harness.program`` starts and in all that these start.

The process then writes where all its threads stand to its own file in ``$TEST_STACKS`` whenever it gets SIGUSR1, even
when it is stuck in C code. Modules that are named in ``$TEST_WITHOUT_MODULES`` cannot be imported there.
"""

import faulthandler
import os
import signal
import sys


def _answer_signals() -> None:
    path = os.path.join(os.environ["TEST_STACKS"], str(os.getpid()))
    # A descriptor and no file object, which would warn of not being closed when the program ends.
    file = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    # Its name says that the signal is answered now, and no longer ends the process.
    os.rename(f"{path}.new", path)


if os.path.isdir(os.environ.get("TEST_STACKS", "")):
    _answer_signals()
    os.register_at_fork(after_in_child=_answer_signals)

# None in the place of a module makes its import an error.
sys.modules.update(dict.fromkeys(os.environ.get("TEST_WITHOUT_MODULES", "").split()))  # type: ignore[arg-type]
