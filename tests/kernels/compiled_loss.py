"""Run as a program: the Triton kernels of the loss compiled for GPUs that need not be here; as JSON what they are like.

A process of its own, with a cache folder of its own, and without the interpreter.
"""

import json
import sys

from machine_code import compile_for, facts_of
from memory_order import unordered_accesses

from shardwise.kernels import loss_triton

PLAIN = {"CAP": 0.0, "TEMPERATURE": 1.0, "WANT_SUM": False, "EXPONENTIATE": True, "HAS_REST": False}
ALL = {"CAP": 30.0, "TEMPERATURE": 0.7, "WANT_SUM": True, "EXPONENTIATE": True, "HAS_REST": True}
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


def compile_kernel(name, capability, logits, options, num_columns, *, vector=None):
    """For rows that begin at multiples of 16 bytes, or of so many elements as are in ``vector``."""
    kernel = getattr(loss_triton, name)
    wide = "fp64" if logits == "fp64" else "fp32"
    vector = vector or 16 // BYTES[logits]
    if name == "statistics_kernel":
        block, depth, num_warps = loss_triton.launch_shape(num_columns, BYTES[wide])
    else:
        block, num_warps = loss_triton.gradient_shape(num_columns)
        depth = 1
    constants = options | {"VECTOR": vector, "DEPTH": depth, "BLOCK": block}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    kinds = {key: f"*{wide}" for key in kernel.arg_names if key not in constants}
    kinds |= {key: f"*{logits}" for key in ("out", "logits") if key in kinds}
    kinds |= {key: "i64" for key in kinds if "stride" in key} | {"target_local": "*i64", "num_columns": "i32"}
    # A number of columns that is no multiple of anything. PyTorch's own memory begins at multiples of 16 bytes.
    divisible = {key for key, kind in kinds.items() if kind.startswith("*")}
    return compile_for(kernel, capability, kinds, constants, num_warps=num_warps, divisible=divisible)


def compiled_everywhere():
    """Each kernel for each kind of GPU and of logits, at shards of some widths."""
    made = {}

    def add(name, capability, logits, options, num_columns, what, **vector):
        asm = compile_kernel(name, capability, logits, options, num_columns, **vector)
        made[f"{name}, {capability}, {logits}, {num_columns}, {what}"] = facts_of(asm)

    for name in ("statistics_kernel", "gradient_kernel"):
        for logits in BYTES:
            add(name, 90, logits, ALL, 131073, "all")
        # Each of the table's shapes.
        for num_columns in (201, 801, 6283, 25129) if name == "statistics_kernel" else ():
            add(name, 90, "fp32", ALL, num_columns, "all")
        for logits in ("bf16", "fp64"):
            add(name, 80, logits, PLAIN, 131073, "plain")
        for num_columns in (8192, 32768, 131072):
            add(name, 90, "bf16", PLAIN, num_columns, "plain")
        add(name, 90, "bf16", PLAIN, 25129, "any stride", vector=1)
    return made


def order_of_accesses():
    """What ``row_statistics`` that exponentiates might read of a row after another thread has overwritten it.

    Once as it is, and once without barriers, from fewer columns than a program has threads to several blocks of them.
    """
    found = {}
    for row, logits in enumerate(("bf16", "fp32", "fp64")):
        for column, num_columns in enumerate((10, 100, 1000, 64128)):
            # Every two of the three values meet.
            vector = 1 if (row + column) % 2 else 16 // BYTES[logits]
            ptx = compile_kernel("statistics_kernel", 90, logits, PLAIN, num_columns, vector=vector)["ptx"]
            found[f"{logits}, {num_columns} columns in vectors of {vector}"] = [
                unordered_accesses(ptx),
                unordered_accesses(ptx.replace("bar.sync", "// bar.sync")),
            ]
    return found


def main():
    json.dump({"compiled": compiled_everywhere(), "order": order_of_accesses()}, sys.stdout)


if __name__ == "__main__":
    main()
