"""Write the pages of the reference: one for each public module, with its public names.

A module is public if a page or an example names it, if it is one of the ten files of docs/reading.md, or if it has one
of Megatron's names. A name of it is public if it is in ``__all__``, or is exported (``import x as x``), or is defined
there with a docstring and without an underscore. What several modules have is described in one of them, and the others
refer to it.
"""

import ast
import importlib
import inspect
import re
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

from shardwise.megatron.aliases import MEGATRON, SHORT

ROOT = Path(__file__).parents[2]
CORE = "shardwise.megatron.core"
READING = re.compile(r"`src/(shardwise/[\w/]+)\.py`")
ROOMS = {
    "Library": "core kernels nn exact models data training storage",
    "Program": "run cli",
    "Instruments": "plan doctor conformance",
    "Megatron's names": "megatron parallel_state tensor_parallel",
}


def modules() -> list[str]:
    """Return the names of the public modules."""
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*")]
    texts = [path.read_text(encoding="utf-8") for path in files if path.suffix in (".md", ".py", ".ipynb")]
    named = set(re.findall(r"\bshardwise(?:\.\w+)+", "\n".join(texts))) | {"shardwise"}
    named |= {name.replace("/", ".") for name in READING.findall((ROOT / "docs" / "reading.md").read_text("utf-8"))}
    # Of several short names of one of Megatron's modules, that of its file, or else the first.
    first = {target: short for short, target in reversed(SHORT.items())}
    for target in MEGATRON.values():
        if target.startswith(tuple(f"{CORE}.{package}" for package in ("parallel_state", "tensor_parallel"))):
            first[target] = f"shardwise{target.removeprefix(CORE)}"
    named = set(map(_longest_module, named)) | set(MEGATRON.values())
    return sorted({first.get(name, name) for name in named})


def _longest_module(name: str) -> str:
    """Return the longest beginning of a dotted name that is a module; its real name, if it has an alias."""
    while True:
        if name in SHORT:
            return SHORT[name]
        path = ROOT / "src" / Path(*name.split("."))
        if path.with_suffix(".py").exists() or (path / "__init__.py").exists():
            return name
        name = name.rpartition(".")[0]


def names_of(module: ModuleType) -> list[str]:
    """Return the public names of a module, in the order of its source."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return [name for name in listed if not isinstance(getattr(module, name), ModuleType)]
    names: list[str] = []
    statements = ast.parse(Path(module.__file__ or "").read_text(encoding="utf-8")).body
    for statement, following in pairwise([*statements, None]):
        match statement:
            case ast.ImportFrom(names=imported):
                names += [each.name for each in imported if each.asname == each.name]
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) if ast.get_docstring(statement):
                names.append(name)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)) if isinstance(
                following, ast.Expr
            ) and isinstance(following.value, ast.Constant):
                names.append(name)
    return [name for name in names if name[0] != "_" and not isinstance(getattr(module, name), ModuleType)]


def public_names() -> dict[str, dict[str, str]]:
    """Return the names of each public module, each with the full name under which it is described."""
    found: dict[str, dict[str, str]] = {}
    homes: dict[int, str] = {}
    # A package, with short names, before its modules; Megatron's names after those of the library.
    for module_name in sorted(modules(), key=lambda name: (_room(name) == "Megatron's names", name.count("."), name)):
        module = importlib.import_module(module_name)
        found[module_name] = {}
        for name in names_of(module):
            value = getattr(module, name)
            here = f"{module_name}.{name}"
            has_identity = inspect.isclass(value) or inspect.isroutine(value)
            found[module_name][name] = homes.setdefault(id(value), here) if has_identity else here
    return found


def _room(module: str) -> str:
    room = [*module.split("."), ""][1]
    return next((title for title, rooms in ROOMS.items() if room in rooms.split()), "Library")


def write(folder: Path) -> None:
    """Write the pages of all public modules, and an index, as far as they differ from what is there."""
    folder.mkdir(exist_ok=True)
    found = public_names()
    pages = {f"{module}.rst": _page(module, names) for module, names in found.items()}
    pages["index.rst"] = _index(found)
    for path in folder.iterdir():
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def _page(module: str, names: dict[str, str]) -> str:
    lines = [module, "=" * len(module), "", f".. automodule:: {module}", ""]
    if others := sorted(set(_also(module))):
        lines += [f"Also importable as {', '.join(f'``{name}``' for name in others)}.", ""]
    if names:
        lines += [", ".join(f":py:obj:`{name} <{home}>`" for name, home in names.items()), ""]
    for name, home in names.items():
        if home == f"{module}.{name}":
            lines += _entry(home, getattr(sys.modules[module], name))
    return "\n".join(lines)


def _also(module: str) -> list[str]:
    target = sys.modules[module].__name__
    return [name for name in [*(short for short, other in SHORT.items() if other == target), target] if name != module]


def _entry(home: str, value: Any) -> list[str]:
    if inspect.isclass(value):
        bases = [] if value.__bases__ == (object,) else ["   :show-inheritance:"]
        return [f".. autoclass:: {home}", "   :members:", *bases, ""]
    if inspect.isroutine(value):
        return [f".. autofunction:: {home}", ""]
    module, _, name = home.rpartition(".")
    text = inspect.cleandoc(_description(module, name)).splitlines()
    return [f".. py:data:: {home}", "", *(f"   {line}".rstrip() for line in text), ""]


def _description(module: str, name: str) -> str:
    """Return the text below the assignment of a module's variable, which may be of another module."""
    statements = ast.parse(Path(sys.modules[module].__file__ or "").read_text(encoding="utf-8")).body
    for statement, following in pairwise([*statements, None]):
        match statement, following:
            case ast.ImportFrom(module=str(other), names=imported), _ if name in [each.name for each in imported]:
                return _description(other, name)
            case (
                (ast.Assign(targets=[ast.Name(id=found)]) | ast.AnnAssign(target=ast.Name(id=found))),
                ast.Expr(value=ast.Constant(value=str(text))),
            ) if found == name:
                return text
    return ""


def _index(found: dict[str, dict[str, str]]) -> str:
    lines = ["API reference", "=============", ""]
    lines += ["Every public name, from its docstring. Names of the same object are described once.", ""]
    by_room = defaultdict(list)
    for module in sorted(found):
        by_room[_room(module)].append(module)
    for title in ROOMS:
        lines += [title, "-" * len(title), "", ".. toctree::", "   :maxdepth: 1", ""]
        lines += [f"   {module}" for module in by_room[title]] + [""]
    return "\n".join(lines)
