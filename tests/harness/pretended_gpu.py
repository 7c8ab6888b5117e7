"""The fixture ``pretended_gpu``: run a function where PyTorch believes in a GPU, without one.

::

    def where_the_weights_are():                  # of the test module; what it returns is sent back
        with fake_tensors():
            return {str(weight.device) for weight in GPTModel(...).parameters()}

    def test_weights(pretended_gpu):
        assert pretended_gpu(where_the_weights_are) == {"cuda:0"}

What a function can do there stands in ``harness.on_pretended_gpu``. Each runs in a process of its own, forked off one
that has loaded PyTorch and this package already, so that only the first takes seconds.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.program import Program

_SOURCE = Path(__file__).with_name("pretended_gpu.cpp")
# PyTorch looks for accelerators while it is imported.
_SERVER = """
import ctypes, sys
ctypes.CDLL(sys.argv[1])
from harness.on_pretended_gpu import serve
serve()
"""


class PretendedGpu:
    """Runs functions on the pretended GPU.

    Args:
        server: a program that serves (``harness.on_pretended_gpu.serve``).
        folder: for messages to it and from it.
    """

    def __init__(self, server: Program, folder: Path) -> None:
        self._server = server
        self._folder = folder
        self._count = 0

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """What ``function(*args)`` returns there.

        Args:
            function: defined at the top of a test module.
            *args: picklable.

        Raises:
            AssertionError: it failed there; with its traceback.
        """
        __tracebackhide__ = True
        self._count += 1
        request, reply = self._folder / f"request{self._count}", self._folder / f"reply{self._count}"
        path = importlib.import_module(function.__module__).__file__
        request.write_bytes(pickle.dumps((function.__module__, path, function.__qualname__, pickle.dumps(args))))
        self._server.stdin.write(f"{request} {reply}\n".encode())
        self._server.stdin.flush()
        self._server.wait_for_file(reply)
        succeeded, value = pickle.loads(reply.read_bytes())
        if not succeeded:
            raise AssertionError(f"on the pretended GPU:\n{value}")
        return value


@pytest.fixture(scope="session")
def pretended_gpu(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[PretendedGpu]:
    """A ``PretendedGpu``; the test is skipped where there is no C++ compiler, or where PyTorch has CUDA of its own."""
    if torch.version.cuda is not None or torch.version.hip is not None:
        pytest.skip("this PyTorch knows CUDA itself, and believes in no other")
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("a pretended GPU needs a C++ compiler; install one, or name it in CXX")
    folder = tmp_path_factory.mktemp("pretended_gpu")
    library = _library(compiler, request.config)
    with Program(
        "-c",
        _SERVER,
        library,
        stdin=subprocess.PIPE,
        PYTHONPATH=os.pathsep.join(filter(None, sys.path)),
    ) as server:
        yield PretendedGpu(server, folder)
        server.stdin.close()
        server.finish()


def _library(compiler: str, config: pytest.Config) -> Path:
    """``pretended_gpu.cpp``, compiled against this PyTorch; kept from run to run."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    home = Path(found.origin).parent
    mark = hashlib.sha256(_SOURCE.read_bytes() + f"{torch.__version__} {home} {compiler}".encode()).hexdigest()[:16]
    library = Path(config.cache.mkdir("pretended_gpu")) / f"{mark}.so"  # type: ignore[union-attr]
    if not library.exists():
        made = library.with_suffix(f".{os.getpid()}")
        options = ["-std=c++20", "-shared", "-fPIC", f"-I{home}/include"]
        # After the source, or the linker would leave them out.
        libraries = [f"-L{home}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{home}/lib"]
        done = subprocess.run(
            [compiler, *options, str(_SOURCE), *libraries, "-o", str(made)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        made.replace(library)
    return library
