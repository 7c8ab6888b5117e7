"""Run as a program: the kernel compiled to machine code for GPUs that need not be here; its target, size, and
whether it reads numbers one by one, as JSON.

A process of its own, with a cache folder of its own, and without the interpreter.
"""

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from shardwise.kernels import norms_triton

VECTORS = ("residual", "new_residual", "bias", "weight", "norm_bias")


def compile_for(capability, dtype, num_columns, everything):
    block = max(16, norms_triton.block_size(num_columns))
    constants = {
        "EPS": 1e-5,
        "WORLD_SIZE": 8,
        "HAS_BIAS": everything,
        "IS_LAYER_NORM": everything,
        "IS_DOUBLE": dtype == "fp64",
        "BLOCK": block,
    }
    kinds = dict.fromkeys(VECTORS, f"*{dtype}") | {"addresses": "*i64", "start": "i32", "num_columns": "i32"}
    kernel = norms_triton.reduce_norm_kernel
    source = ASTSource(
        kernel,
        signature={name: kinds.get(name, "constexpr") for name in kernel.arg_names},
        constexprs={(i,): constants[name] for i, name in enumerate(kernel.arg_names) if name in constants},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name not in constants},
    )
    options = {"num_warps": norms_triton.num_warps(block // 2)}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm


def main():
    made = {}
    for case in (
        (80, "bf16", 4096, False),
        (90, "bf16", 4096, False),
        (90, "fp32", 16384, True),
        (90, "fp64", 64, True),
    ):
        asm = compile_for(*case)
        target = next(line for line in asm["ptx"].splitlines() if line.startswith(".target"))
        made[f"{case}"] = [target, len(asm["cubin"]), "ld.global.b16" in asm["ptx"]]
    json.dump(made, sys.stdout)


if __name__ == "__main__":
    main()
