"""Run as a program: the Triton kernels compiled to machine code for GPUs that need not be here, as JSON.

A process of its own, with a cache folder of its own, and without the interpreter.
"""

import json
import sys

import triton
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


def compile_for(kernel, capability, logits, values):
    arguments = ARGUMENTS[kernel]
    wide = "fp64" if logits == "fp64" else "fp32"
    values = values | {"BLOCK": loss_triton.block_size(64128)}
    source = ASTSource(
        getattr(loss_triton, kernel),
        signature={
            name: kind.format(logits=logits, wide=wide) if kind else "constexpr" for name, kind in arguments.items()
        },
        constexprs={(i,): values[name] for i, (name, kind) in enumerate(arguments.items()) if kind is None},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8}).asm


def main():
    made = {}
    for kernel in ARGUMENTS:
        for capability in (80, 90):
            for logits in ("bf16", "fp16", "fp32", "fp64"):
                for name, values in (("plain", PLAIN), ("all", ALL)):
                    asm = compile_for(kernel, capability, logits, values)
                    target = next(line for line in asm["ptx"].splitlines() if line.startswith(".target"))
                    made[f"{kernel}, {capability}, {logits}, {name}"] = [target, len(asm["cubin"])]
    json.dump(made, sys.stdout)


if __name__ == "__main__":
    main()
