"""Run as a program: AdamW's kernel compiled for several GPUs; as JSON what it is like.

A process of its own, with a cache folder of its own, and without the interpreter.
"""

import json
import math
import sys

import triton.language as tl
from machine_code import compile_for, facts_of

from shardwise.kernels import adamw_triton


def update(capability, rounded):
    constants = {"BETA1": 0.9, "BETA2": 0.95, "EPSILON": 1e-8, "ROUNDED": rounded, "SCALES": True, "CLEARS": True}
    constants |= {"LOG_BETA1": math.log2(0.9), "LOG_BETA2": math.log2(0.95)}
    constants |= {"COLUMNS": 7, "PART": 512, "BLOCK": adamw_triton.BLOCK}
    kinds = {"tensors": "*i64", "blocks": "*i32", "factor": "*fp32", "learning_rate": "fp32", "decay": "fp32"}
    divisible = ("tensors", "blocks", "factor")
    return compile_for(adamw_triton.adamw_kernel, capability, kinds, constants, num_warps=4, divisible=divisible)


def main():
    made = {}
    for capability in (80, 90, 100, 120):
        for name, rounded in (("bf16", tl.bfloat16), ("none", None)):
            made[f"{capability}, {name}"] = facts_of(update(capability, rounded))
    json.dump(made, sys.stdout)


if __name__ == "__main__":
    main()
