"""The folder of a run: held by one run at a time, and cleared of what a killed one left."""

import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from shardwise.core.communication.agreement import agree
from shardwise.core.folder_lock import FolderLock
from shardwise.core.processes import clear_leftovers
from shardwise.run.processes.ranks import Ranks
from shardwise.storage.checkpoint.folder import clear_unfinished

# Of ``files.write_atomically``, of adapters, and of exports.
_UNFINISHED = re.compile(r"\..+\.tmp|adapter_\w+\.\w+\.new|export\.partial|\.export\.partial\..*")


@contextmanager
def hold_folder(out: Path, ranks: Ranks) -> Iterator[None]:
    """Hold ``out`` for the length of the block; every rank calls, and the first one holds it.

    What a killed run left there unfinished is removed. If nothing is written in the block, and the folder was made for
    it, it is gone afterwards.

    Raises:
        ConfigError: another run is there, which is named, or the folder cannot be written to; on every rank.
    """
    with ExitStack() as stack:
        agree(lambda: stack.enter_context(_cleared(out)) if ranks.is_first else None, group=ranks.world)
        yield


def _cleared(out: Path) -> FolderLock:
    lock = FolderLock(out)
    clear_leftovers()
    if lock.left_by is not None:
        print(f"note   {lock.left_by} was in {out} and was killed; what it left unfinished is removed", flush=True)
    # What cannot be removed is in nobody's way.
    with suppress(OSError):
        for path in [path for path in out.iterdir() if _UNFINISHED.fullmatch(path.name)]:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
        clear_unfinished(out / "checkpoints")
    return lock
