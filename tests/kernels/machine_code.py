"""Triton kernels compiled for GPUs that need not be here, and what is found in their code.

Without the interpreter; give each program that uses this a cache folder of its own.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import triton
from memory_order import BARRIERS, statements_of
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_WIDTHS = {"b8": 1, "b16": 2, "b32": 4, "b64": 8}


def compile_for(kernel, capability, kinds, constants, *, num_warps, divisible=None):
    """A kernel's code."""
    names = kernel.arg_names
    assert set(names) == set(kinds) | set(constants), set(names) ^ (set(kinds) | set(constants))
    divisible = set(kinds) if divisible is None else divisible
    source = ASTSource(
        kernel,
        signature={name: kinds.get(name, "constexpr") for name in names},
        constexprs={(i,): constants[name] for i, name in enumerate(names) if name in constants},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in divisible},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps}).asm


def target_of(asm):
    """Such as ``.target sm_90a``."""
    return next(line for line in asm["ptx"].splitlines() if line.startswith(".target"))


def usage_of(asm):
    """``(registers, bytes)``: of a thread, and its memory for what registers do not hold."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        done = subprocess.run(
            [_TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    usage = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", done.stdout)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


def num_barriers(asm):
    """Places in the code where threads wait for each other, and how many of them lie in a loop."""
    statements, labels = statements_of(asm["ptx"])
    places = [i for i, (_, operation, _) in enumerate(statements) if operation.startswith(BARRIERS)]
    loops = [
        (labels[operands.strip()], i)
        for i, (_, operation, operands) in enumerate(statements)
        if operation.startswith("bra") and labels[operands.strip()] <= i
    ]
    return len(places), sum(any(start <= place <= stop for start, stop in loops) for place in places)


def access_widths(asm, operation="ld"):
    """How many bytes a thread reads (or with ``"st"`` writes) at once in global memory: the widths that occur."""
    found = set()
    for vector, kind in re.findall(rf"\b{operation}\.global(?:\.\w+)*?(?:\.v(\d))?\.(b\d+)\b", asm["ptx"]):
        found.add(int(vector or 1) * _WIDTHS[kind])
    return sorted(found)


def facts_of(asm):
    """Target, widths of reads and writes, registers and memory, and barriers of a kernel, for JSON."""
    return {
        "target": target_of(asm),
        "reads": access_widths(asm),
        "writes": access_widths(asm, "st"),
        "usage": usage_of(asm),
        "barriers": num_barriers(asm),
    }
