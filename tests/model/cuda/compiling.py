"""Compiles the Triton kernels for GPUs that are not here, each as `TritonOperators` would launch it; prints which.

    python -m tests.model.cuda.compiling CAPABILITY ...     (such as 75 90)

A process of its own: where the tests run, Triton interprets.
"""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from ppserve.model.cuda.operators import Tiles
from ppserve.model.cuda.triton_operators import TritonOperators

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Of the block size the kernel is made anew. 16 is the default.
BLOCK_SIZES = (8, 16, 32)
HEADS, HEAD_SIZE = 2, 64
_TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
}


def compile_launches(capability: int) -> None:
    """From now on a launch compiles for such a GPU, and does nothing else."""

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        names = [parameter.name for parameter in kernel.params]
        values = dict(zip(names, args, strict=False)) | {n: of for n, of in named.items() if n in names}
        constants = {each.name: values[each.name] for each in kernel.params if each.is_constexpr}
        signature = {name: "constexpr" if name in constants else type_of(values[name]) for name in names}
        options = {name: of for name, of in named.items() if name not in names}
        made = triton.compile(
            ASTSource(kernel, signature, constants), GPUTarget("cuda", capability, 32), options=options
        )
        assert made.asm["cubin"]
        print(capability, kernel.__name__, *{of for of in signature.values() if of[0] == "*"}, flush=True)

    JITFunction.run = run


def type_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    return "i32" if isinstance(value, int) else "fp32"


def launch_all() -> None:
    operators = TritonOperators()
    for dtype in DTYPES:
        x_TK, weight_NK = torch.zeros(3, 100, dtype=dtype), torch.zeros(70, 100, dtype=dtype)
        operators.product(x_TK, weight_NK, weight_NK[:, 0])
        operators.product(x_TK, weight_NK, None)
        operators.quick_gelu(x_TK)
        for kv_dtype, block_size in [*product([dtype], BLOCK_SIZES), (torch.float32, 16), (torch.bfloat16, 16)]:
            keys_BpHd = torch.zeros(4, block_size, HEADS, HEAD_SIZE, dtype=kv_dtype)
            qkv_TE = torch.zeros(3, 3 * HEADS * HEAD_SIZE, dtype=dtype)
            numbers = torch.zeros(4, 4, dtype=torch.int32)
            operators.write(qkv_TE, keys_BpHd, keys_BpHd, numbers[0])
            operators.attend(qkv_TE, keys_BpHd, keys_BpHd, Tiles(numbers, numbers[0], 10), 0.3)
    scores_RV = torch.zeros(2, 1009)
    operators.weights(scores_RV, scores_RV[:, 0], scores_RV[:, 1])
    operators.running_sums(scores_RV)


if __name__ == "__main__":
    for capability in map(int, sys.argv[1:]):
        compile_launches(capability)
        launch_all()
