"""Run as a program: the kernels of SwiGLU, rotary embedding and the norm of a sum compiled; as JSON what they are like.

A process of its own, with a cache folder of its own, and without the interpreter.
"""

import json
import sys

from machine_code import compile_for, facts_of

from shardwise.kernels import elementwise_triton, norms_triton


def elementwise(name, dtype, capability):
    kernel = getattr(elementwise_triton, name)
    strides = {name: "i64" for name in kernel.arg_names if "stride" in name}
    tensors = {
        name: f"*{dtype}" for name in ("inner", "output", "grad_output", "grad_inner") if name in kernel.arg_names
    }
    constants = {"IS_DOUBLE": dtype == "fp64", "BLOCK": 1024}
    return compile_for(kernel, capability, strides | tensors | {"width": "i32"}, constants, num_warps=4)


def rotary(dtype, capability, *, interleaved, to_mixed, others):
    kernel = elementwise_triton.rotary_kernel
    tensors = dict.fromkeys(("mixed", "query", "key", "value", "cos", "sin"), f"*{dtype}")
    constants = {
        "PER_GROUP": 4,
        "NUM_OTHERS": others,
        "HALF": 64,
        "REST": 0,
        "INTERLEAVED": interleaved,
        "TO_MIXED": to_mixed,
        "IS_DOUBLE": dtype == "fp64",
        "BLOCK_HEADS": 16,
        "BLOCK_HALF": 64,
        "BLOCK_REST": 1,
    }
    numbers = {name: "i32" for name in kernel.arg_names if name not in tensors and name not in constants}
    divisible = set(tensors) | {name for name in numbers if name[-2:] in ("_s", "_b", "_h")}
    kinds = tensors | numbers | {"sign": "fp32"}
    return compile_for(kernel, capability, kinds, constants, num_warps=4, divisible=divisible)


def norm(name, dtype, capability, width):
    kernel = getattr(norms_triton, name)
    wide = "fp64" if dtype == "fp64" else "fp32"
    constants = {"IS_DOUBLE": dtype == "fp64", "BLOCK": norms_triton.block_size(width)}
    constants |= {"EPS": 1e-5, "HAS_GRAD_TOTAL": True, "WANT_WEIGHT": True}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    kinds = {name: f"*{dtype}" for name in kernel.arg_names if name not in constants}
    kinds |= {name: f"*{wide}" for name in ("scale", "partial_sums") if name in kinds}
    kinds |= {name: "i64" for name in kinds if "stride" in name} | {"num_columns": "i32"}
    kinds |= {name: "i32" for name in ("num_rows",) if name in kinds}
    num_warps = norms_triton.num_warps(constants["BLOCK"])
    return compile_for(kernel, capability, kinds, constants, num_warps=num_warps)


def kernels():
    for capability in (80, 90):
        for dtype in ("bf16", "fp32", "fp64") if capability == 90 else ("bf16",):
            for name in ("swiglu_kernel", "swiglu_gradient_kernel"):
                yield f"{name}, {capability}, {dtype}", elementwise(name, dtype, capability)
            for interleaved in (False, True):
                for to_mixed, others in ((False, 2), (True, 2), (False, 0)):
                    asm = rotary(dtype, capability, interleaved=interleaved, to_mixed=to_mixed, others=others)
                    yield f"rotary, {capability}, {dtype}, {interleaved=}, {to_mixed=}, {others=}", asm
            for name in ("add_rms_norm_kernel", "add_rms_norm_gradient_kernel"):
                width = 4096 if dtype == "fp64" else 8192
                yield f"{name}, {capability}, {dtype}", norm(name, dtype, capability, width)


def main():
    made = {name: facts_of(asm) for name, asm in kernels()}
    json.dump(made, sys.stdout)


if __name__ == "__main__":
    main()
