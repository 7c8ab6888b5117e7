"""The fixture ``pretended_gpu``: run a function in a process where PyTorch reports a GPU that does not exist.

::

    def where_the_weights_are():                  # in the test module; the return value is sent back
        with fake_tensors():
            return {str(weight.device) for weight in GPTModel(...).parameters()}

    def test_weights(pretended_gpu):
        assert pretended_gpu(where_the_weights_are) == {"cuda:0"}

``harness.on_pretended_gpu`` describes what a function can do there. Each call runs in its own process, forked from one
that has loaded PyTorch and this package, so that only the first call takes seconds.
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
# PyTorch detects accelerators while it is imported.
_SERVER = """
import ctypes, sys
ctypes.CDLL(sys.argv[1])
from harness.on_pretended_gpu import serve
serve()
"""


class PretendedGpu:
    """Runs functions on the pretended GPU."""

    def __init__(self, server: Program, folder: Path) -> None:
        self._server = server
        self._folder = folder
        self._count = 0

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function(*args)`` there and return its result."""
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
    """A ``PretendedGpu``; the test is skipped if there is no C++ compiler, or if PyTorch was built with CUDA."""
    if torch.version.cuda is not None or torch.version.hip is not None:
        pytest.skip("this PyTorch knows CUDA itself, and believes in no other")
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("a pretended GPU needs a C++ compiler; install one, or name it in CXX")
    folder = tmp_path_factory.mktemp("pretended_gpu")
    cache = getattr(request.config, "cache", None)
    library = _library(compiler, folder if cache is None else Path(cache.mkdir("pretended_gpu")))
    with Program(
        "-c", _SERVER, library, stdin=subprocess.PIPE, PYTHONPATH=os.pathsep.join(filter(None, sys.path))
    ) as server:
        yield PretendedGpu(server, folder)
        server.stdin.close()
        server.finish()


def _library(compiler: str, folder: Path) -> Path:
    """Compile ``pretended_gpu.cpp`` against this PyTorch, unless the library is in ``folder`` already."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    home = Path(found.origin).parent
    mark = hashlib.sha256(_SOURCE.read_bytes() + f"{torch.__version__} {home} {compiler}".encode()).hexdigest()[:16]
    library = folder / f"{mark}.so"
    if not library.exists():
        made = library.with_suffix(f".{os.getpid()}")
        options = ["-std=c++20", "-shared", "-fPIC", f"-I{home}/include"]
        # After the source; otherwise the linker would omit them.
        libraries = [f"-L{home}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{home}/lib"]
        done = subprocess.run(
            [compiler, *options, str(_SOURCE), *libraries, "-o", str(made)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        made.replace(library)
    return library
