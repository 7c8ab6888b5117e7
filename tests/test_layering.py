"""Every module can be imported first, says truly what it offers, and brings no more with it than it must."""

import builtins
import pkgutil
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from harness.program import run

import shardwise
from shardwise import errors

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


# Optional packages must not be needed: they cannot be imported here. With "alone" each module has a process of its own,
# so that none leans on another's having been imported before; what others made is there already, as it takes most of
# the time.
IMPORT_EACH = """
import os, sys
import torch, numpy, tyro, tokenizers, safetensors.torch, tqdm, torch.distributed.checkpoint, torch.optim
for name in ("matplotlib", "tensorboard", "hypothesis", "pytest"):
    sys.modules[name] = None

def check(name):
    __import__(name)
    module = sys.modules[name]
    missing = [public for public in getattr(module, "__all__", []) if not hasattr(module, public)]
    assert not missing, f"{name}.__all__ names {missing}"

failed = False
for name in sys.argv[2:]:
    child = os.fork() if sys.argv[1] == "alone" else 0
    if child:
        failed |= os.waitpid(child, 0)[1] != 0
        continue
    try:
        check(name)
    except BaseException as error:
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        failed = True
    if sys.argv[1] == "alone":
        os._exit(failed)
sys.exit(failed)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["together", "alone"])
def test_every_module_can_be_imported(how):
    assert len(MODULES) > 30
    # Each core has a part of them.
    halves = [MODULES] if how == "together" else [MODULES[::2], MODULES[1::2]]
    with ThreadPoolExecutor() as threads:
        for done in threads.map(lambda names: run_python(IMPORT_EACH, how, *names), halves):
            assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [name for name in vars(errors) if name.endswith("Error") and name != "ShardwiseError"])
def test_every_error_is_in_the_tree_that_is_drawn(name):
    (builtin,) = re.findall(rf"── {name} +\((\w+)\)", errors.__doc__)
    error = getattr(errors, name)
    assert issubclass(error, errors.ShardwiseError)
    assert issubclass(error, getattr(builtins, builtin))
    assert str(error("told")) == "told"


def test_the_tree_draws_no_more():
    drawn = set(re.findall(r"── (\w+)", errors.__doc__))
    assert drawn == {name for name in vars(errors) if name.endswith("Error")} - {"ShardwiseError"}
