"""Every module can be imported first, says truly what it offers, and brings no more with it than it must."""

import pkgutil
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness.program import run

import shardwise
from shardwise.core import errors

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(shardwise.__path__, "shardwise.")
    if not module.name.endswith("__main__")
)


def run_python(code, *arguments):
    return run("-W", "error", "-c", code, *arguments, exit_code=None)


def test_the_package_itself_brings_no_torch():
    done = run_python(
        "import sys, shardwise\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'tyro', 'safetensors', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert shardwise.__version__"
    )
    assert done.returncode == 0, done.stderr


# Optional packages must not be needed: they cannot be imported here. Each module is the first to be imported: in a
# process where nothing is but the packages that it is in, so that it leans on no other's having been imported before.
# One that its package has imported by then needs no process of its own. What others made is there already, as it takes
# most of the time.
IMPORT_EACH = """
import os, sys
import torch, numpy, tyro, tokenizers, safetensors.torch, tqdm, torch.distributed.checkpoint, torch.optim
for name in ("matplotlib", "tensorboard", "hypothesis", "pytest"):
    sys.modules[name] = None
import shardwise

def check(name):
    __import__(name)
    print(name)
    module = sys.modules[name]
    missing = [public for public in getattr(module, "__all__", []) if not hasattr(module, public)]
    assert not missing, f"{name}.__all__ names {missing}"

def visit(name):
    "Check a module and those that are in it; whether one failed."
    failed = False
    try:
        check(name)
    except BaseException as error:
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        failed = True
    for inner in (module for module in modules if module.rpartition(".")[0] == name):
        failed |= visit(inner) if inner in sys.modules else visit_alone(inner)
    return failed

def visit_alone(name):
    sys.stdout.flush()
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] != 0
    failed = visit(name)
    sys.stdout.flush()
    os._exit(failed)

first, *modules = sys.argv[1:]
sys.exit(any([visit_alone(name) for name in first.split()]))
"""


@pytest.mark.slow
def test_every_module_can_be_imported_first():
    assert len(MODULES) > 30
    rooms = [name for name in MODULES if name.count(".") == 1]
    # Each core has a part of them.
    with ThreadPoolExecutor() as threads:
        parts = threads.map(lambda part: run_python(IMPORT_EACH, " ".join(part), *MODULES), (rooms[::2], rooms[1::2]))
    checked = []
    for done in parts:
        assert done.returncode == 0, done.stderr
        checked += done.stdout.split()
    assert sorted(checked) == MODULES


@pytest.mark.parametrize("name", [name for name in vars(errors) if name.endswith("Error") and name != "ShardwiseError"])
def test_every_error_is_one_of_python_s_too(name):
    error = getattr(errors, name)
    assert issubclass(error, errors.ShardwiseError)
    assert issubclass(error, ValueError | RuntimeError | MemoryError)
    assert str(error("told")) == "told"
