"""Run as a program: the Triton kernels compiled to machine code for GPUs that need not be here, as JSON.

A process of its own, with a cache folder of its own, and without the interpreter.
"""

import json
import sys

import triton
from memory_order import unordered_accesses
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from shardwise.kernels import loss_triton

ARGUMENTS = {
    "statistics_kernel": {
        "logits": "*{logits}",
        "target_local": "*i64",
        "statistics": "*{wide}",
        "stride": "i64",
        "num_columns": "i32",
        "CAP": None,
        "TEMPERATURE": None,
        "WANT_SUM": None,
        "EXPONENTIATE": None,
        "BLOCK": None,
    },
    "gradient_kernel": {
        "out": "*{logits}",
        "logits": "*{logits}",
        "target_local": "*i64",
        "shift": "*{wide}",
        "scale": "*{wide}",
        "at_target": "*{wide}",
        "rest": "*{wide}",
        "out_stride": "i64",
        "stride": "i64",
        "num_columns": "i32",
        "CAP": None,
        "TEMPERATURE": None,
        "HAS_REST": None,
        "BLOCK": None,
    },
}
PLAIN = {"CAP": 0.0, "TEMPERATURE": 1.0, "WANT_SUM": False, "EXPONENTIATE": True, "HAS_REST": False}
ALL = {"CAP": 30.0, "TEMPERATURE": 0.7, "WANT_SUM": True, "EXPONENTIATE": True, "HAS_REST": True}


def compile_for(kernel, capability, logits, values, num_columns=64128, aligned=False):
    arguments = ARGUMENTS[kernel]
    wide = "fp64" if logits == "fp64" else "fp32"
    values = values | {"BLOCK": loss_triton.block_size(num_columns)}
    source = ASTSource(
        getattr(loss_triton, kernel),
        signature={
            name: kind.format(logits=logits, wide=wide) if kind else "constexpr" for name, kind in arguments.items()
        },
        constexprs={(i,): values[name] for i, (name, kind) in enumerate(arguments.items()) if kind is None},
        # What Triton finds out of the arguments when a kernel is called, and reads wider where it is so.
        attrs={(i,): [["tt.divisibility", 16]] for i, kind in enumerate(arguments.values()) if kind and aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8}).asm


def compiled_everywhere():
    """Each kernel for each kind of GPU and of logits: its target, and the bytes of its machine code."""
    made = {}
    for kernel in ARGUMENTS:
        for capability in (80, 90):
            for logits in ("bf16", "fp16", "fp32", "fp64"):
                for name, values in (("plain", PLAIN), ("all", ALL)):
                    asm = compile_for(kernel, capability, logits, values)
                    target = next(line for line in asm["ptx"].splitlines() if line.startswith(".target"))
                    made[f"{kernel}, {capability}, {logits}, {name}"] = [target, len(asm["cubin"])]
    return made


def order_of_accesses():
    """What ``row_statistics`` that exponentiates might read of a row after another thread has overwritten it.

    Once as it is, and once without barriers.

    From fewer columns than a program has threads to several blocks of them.
    """
    found = {}
    for logits in ("bf16", "fp32", "fp64"):
        for num_columns in (10, 100, 1000, 64128):
            for aligned in (False, True):
                ptx = compile_for("statistics_kernel", 90, logits, PLAIN, num_columns, aligned)["ptx"]
                found[f"{logits}, {num_columns} columns{', aligned' * aligned}"] = [
                    unordered_accesses(ptx),
                    unordered_accesses(ptx.replace("bar.sync", "// bar.sync")),
                ]
    return found


def main():
    json.dump({"compiled": compiled_everywhere(), "order": order_of_accesses()}, sys.stdout)


if __name__ == "__main__":
    main()
