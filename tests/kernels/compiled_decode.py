"""Run as a program: attention of a token to a cache compiled for GPUs that need not be here; as JSON what it is like.

A process of its own, with a cache folder of its own, and without the interpreter.
"""

import json
import sys

from machine_code import access_widths, compile_for, target_of, usage_of

from shardwise.kernels import decode_attention_triton

CONSTANTS = {
    "SCALE": 0.125,
    "CAP": 30.0,
    "BEFORE": 4096,
    "HAS_SLOPES": True,
    "HAS_SINKS": True,
    "PER_GROUP": 4,
    "WIDTH": 128,
    "BLOCK_QUERIES": 16,
    "BLOCK_WIDTH": 128,
    "SPLITS": 32,
}


def compile_kernel(kernel, capability, dtype):
    constants = CONSTANTS | {"BLOCK_KEYS": decode_attention_triton._BLOCK_KEYS[4 if dtype == "fp32" else 2]}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    kinds = {name: "i32" for name in kernel.arg_names if name not in constants}
    kinds |= {name: f"*{dtype}" for name in ("query", "keys", "values", "output", "sinks") if name in kinds}
    kinds |= {name: "*fp32" for name in ("sums", "maxima", "totals", "slopes") if name in kinds}
    kinds |= {"position": "*i64"} if "position" in kinds else {}
    # Strides of a cache, and what PyTorch allocates; not the number of groups.
    divisible = {name for name, kind in kinds.items() if kind.startswith("*") or name[-2:] in ("_b", "_g", "_s")}
    return compile_for(kernel, capability, kinds, constants, num_warps=4, divisible=divisible)


def main():
    made = {}
    for capability in (80, 90):
        for dtype in ("bf16", "fp16", "fp32"):
            for name in ("decode_kernel", "combine_kernel"):
                asm = compile_kernel(getattr(decode_attention_triton, name), capability, dtype)
                made[f"{name}, {capability}, {dtype}"] = {
                    "target": target_of(asm),
                    "usage": usage_of(asm),
                    "reads": access_widths(asm),
                }
    json.dump(made, sys.stdout)


if __name__ == "__main__":
    main()
