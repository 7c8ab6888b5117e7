"""A rank: a process of a pool, which runs the bodies of tests."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import importlib.util
import os
import pickle
import queue
import random
import shutil
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from harness.hypothesis_ranks import FailedExample, draw_alike
from harness.messages import Command, Leave, Outcome, Reply, RunTest
from harness.short_samples import shorten_samples
from harness.stacks import STACK_SIGNAL

SEED = 20_240_817
"""Seed of every test, the same on every rank."""


def log_file(folder: Path, rank: int) -> Path:
    """Return the file for the output of a rank, from Python and from C."""
    return folder / f"rank{rank}.log"


def stack_file(folder: Path, rank: int) -> Path:
    """Return the file for a rank's stacks on ``STACK_SIGNAL``, even inside a collective, and on a crash."""
    return folder / f"rank{rank}.stack"


def main(rank: int, size: int, folder: Path, connection: Connection) -> None:
    """Join the pool's default group, then run commands until ``Leave`` or until the parent has ended."""
    # The imports of the fork server stay alive. Without the freeze, each full collection would visit all of them, which
    # takes a tenth of a second and copies the memory that the ranks share.
    gc.freeze()
    shorten_samples()
    # Ctrl-C reaches every process of the terminal, but only the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _redirect_output(log_file(folder, rank))
    with stack_file(folder, rank).with_suffix(".new").open("w") as stack:
        faulthandler.enable(file=stack, all_threads=False)
        faulthandler.register(STACK_SIGNAL, file=stack, all_threads=False)
        # The final name shows that the signal has a handler now and no longer ends the process.
        os.rename(stack.name, stack_file(folder, rank))
        commands = _listen(connection, folder)
        # The rank runs pytest for its rewriting of assertions. The options of the outer run do not apply here; each
        # test brings the relevant ones.
        for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
            os.environ.pop(name, None)
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        options = ["-c", os.devnull, "--rootdir", str(folder), "--noconftest", "--capture=no", "-p", "no:faulthandler"]
        code = pytest.main(options, plugins=[_Rank(rank, size, folder, connection, commands)])
        faulthandler.unregister(STACK_SIGNAL)
        faulthandler.disable()
    sys.exit(code)


def _redirect_output(path: Path) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    # The streams may be wrappers inherited from the fork server. These write to the file and lose nothing in a crash.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _listen(connection: Connection, folder: Path) -> queue.SimpleQueue[Command]:
    """Receive commands in a thread, which also ends the process at any time when the parent has ended."""
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()

    def receive() -> None:
        while True:
            try:
                command = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                shutil.rmtree(folder, ignore_errors=True)
                os._exit(1)
            commands.put(command)
            if isinstance(command, Leave):
                return

    threading.Thread(target=receive, name="listen", daemon=True).start()
    return commands


# All meshes of this process, by id, because some are equal. DTensor caches them, and a mesh keeps its groups.
_MESHES: weakref.WeakValueDictionary[int, DeviceMesh] = weakref.WeakValueDictionary()


def _remember_meshes() -> None:
    make = DeviceMesh.__init__

    @functools.wraps(make)
    def remembered(mesh: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        make(mesh, *args, **kwargs)
        _MESHES[id(mesh)] = mesh

    DeviceMesh.__init__ = remembered  # type: ignore[method-assign]


class _Rank:
    """A pytest plugin that serves a pool instead of running a test session."""

    def __init__(
        self, rank: int, size: int, folder: Path, connection: Connection, commands: queue.SimpleQueue[Command]
    ) -> None:
        self.rank = rank
        self.size = size
        self.folder = folder
        self.connection = connection
        self.commands = commands

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self) -> int:
        os.environ.pop("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
        torch.set_num_threads(1)
        _remember_meshes()
        store = dist.FileStore(str(self.folder / "store"), self.size)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size)
        group = dist.group.WORLD
        assert group is not None
        self._send(Reply(Outcome.PASSED, time.monotonic()))
        while not isinstance(command := self.commands.get(), Leave):
            if isinstance(command, RunTest):
                reply = _ended(lambda: _run_test(command, group), command.path, command.traceback_style)
            else:
                reply = _ended(lambda: _clean_up(group), __file__, "short", reusable=dist.group.WORLD is group)
            sys.stdout.flush()
            sys.stderr.flush()
            self._send(reply)
        if dist.is_initialized():
            dist.destroy_process_group()
        return 0

    def _send(self, reply: Reply) -> None:
        self.connection.send_bytes(pickle.dumps(reply))


def _ended(body: Callable[[], None], path: str, traceback_style: str, *, reusable: bool = True) -> Reply:
    """Run ``body`` and return its result."""
    try:
        body()
    except pytest.skip.Exception as error:
        return Reply(Outcome.SKIPPED, time.monotonic(), str(error), reusable=reusable)
    except pytest.xfail.Exception as error:
        return Reply(Outcome.XFAILED, time.monotonic(), str(error), reusable=reusable)
    # A test may end with SystemExit or the exception of pytest.fail: both are failures of the test, not of the rank.
    except BaseException as error:
        now = time.monotonic()
        cause = error.cause if isinstance(error, FailedExample) else error
        info = pytest.ExceptionInfo.from_exception(cause)
        info.traceback = info.traceback.cut(path=path)
        text = str(info.getrepr(style=traceback_style))  # type: ignore[arg-type]
        return Reply(Outcome.FAILED, now, info.exconly(tryshort=True), text)
    return Reply(Outcome.PASSED, time.monotonic(), reusable=reusable)


def _run_test(command: RunTest, group: dist.ProcessGroup) -> None:
    sys.path[:] = command.sys_path
    os.chdir(command.folder)
    _set_environment(command.environment, group)
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.filters.extend(pickle.loads(command.warning_filters))  # type: ignore[attr-defined]
        target: Any = _import_test_module(command.module, command.path)
        arguments = pickle.loads(command.arguments)
        for name in command.qualname.split("."):
            target = getattr(target, name)
            if isinstance(target, type):
                target = target()
        draw_alike(target)
        random.seed(SEED)
        np.random.seed(SEED)
        torch.manual_seed(SEED)
        with _replaced(arguments, group) as arguments, _checked_layouts():
            target(**arguments)


def _set_environment(wanted: dict[str, str], group: dist.ProcessGroup) -> None:
    present = {name: value for name, value in os.environ.items() if name.startswith("SHARDWISE_")}
    if wanted == present:
        return
    for name in present:
        del os.environ[name]
    os.environ.update(wanted)
    shared_memory = sys.modules.get("shardwise.core.communication.transports.shared_memory")
    if shared_memory is not None:
        # The variables are read once per group.
        shared_memory.close_channel(group)


@contextlib.contextmanager
def _checked_layouts() -> Iterator[None]:
    """Run the block under the checker of layouts of ``spmd_types`` if ``make typed`` runs the tests.

    Tensors without a type, such as those of the tests, go with each layout.
    """
    if os.environ.get("SHARDWISE_TEST_SPMD_TYPES") != "1":
        yield
        return
    import spmd_types.checker

    # It has no rules for these, which tests, pipeline stages and checkpoints call.
    for name in ("broadcast", "gather", "scatter", "send", "recv", "isend", "irecv"):
        spmd_types.register_no_typecheck(getattr(dist, name))
    # Tests differentiate each rank's own sum of an output.
    with pytest.MonkeyPatch.context() as monkeypatch, spmd_types.checker.typecheck("permissive"):
        monkeypatch.setattr(spmd_types._checker, "_check_backward_loss_type", lambda args, kwargs: None)
        yield


@contextlib.contextmanager
def _replaced(arguments: dict[str, Any], group: dist.ProcessGroup) -> Iterator[dict[str, Any]]:
    """Yield the arguments, with this process's own ``group`` and ``monkeypatch``."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        own = {"group": group, "monkeypatch": monkeypatch}
        yield {name: own.get(name, value) for name, value in arguments.items()}


def _import_test_module(name: str, path: str) -> ModuleType:
    """Import a test module like pytest: from its file, under its name, with rewritten assertions."""
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == path:
        return loaded
    pytest.register_assert_rewrite(name)
    package = name.rpartition(".")[0]
    if package:
        # In pytest's "importlib" mode a test module may name a package that does not exist.
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(package)
    for finder in sys.meta_path:
        spec = finder.find_spec(name, [str(Path(path).parent)])
        if spec is not None and spec.loader is not None:
            break
    else:
        raise ModuleNotFoundError(f"no module {name!r} at {path}", name=name, path=path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _clean_up(group: dist.ProcessGroup) -> None:
    parallel_state = sys.modules.get("shardwise.megatron.core.parallel_state")
    is_initialized = getattr(parallel_state, "model_parallel_is_initialized", None)
    if is_initialized is not None and is_initialized():
        parallel_state.destroy_model_parallel()  # type: ignore[union-attr]
    # Groups that are not freed would keep their sockets and threads until the session ends. A thread of gloo wakes a
    # hundred times per second.
    others = [each for each in dist.distributed_c10d._world.pg_map if each is not group]
    if others:
        while others:
            dist.destroy_process_group(others.pop())
        for mesh in _MESHES.values():
            mesh._pg_registry.clear()
        # Models in cycles of references have groups too.
        gc.collect()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    # Even turning it off imports the compiler, which takes a second.
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
