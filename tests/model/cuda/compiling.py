"""Compiles the Triton kernels for GPUs that are not here, each as `TritonOperators` would launch it: also for what
16 divides, and within the shared memory that such a GPU has. Prints which.

    python -m tests.model.cuda.compiling CAPABILITY ... [DTYPE ...]     (such as 75 90 bfloat16; else all dtypes)

A process of its own: where the tests run, Triton interprets.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from ppserve.core.layers import AttentionSpec
from ppserve.model.cuda.operators import Tiles
from ppserve.model.cuda.triton_operators import TritonOperators

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Of the block size and the head size the kernel is made anew. 16 and 64 are what GPT-2 has by default.
BLOCK_AND_HEAD_SIZES = ((8, 256), (16, 64), (32, 128))
HEADS = 2
# Shared memory that a program may take, by compute capability, in bytes.
SHARED_BYTES = {75: 65_536, 80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}


def compile_launches(capability: int) -> None:
    """Have every launch from now on compile for such a GPU, and do nothing else."""

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        names = [parameter.name for parameter in kernel.params]
        values = dict(zip(names, args, strict=False)) | {n: of for n, of in named.items() if n in names}
        constants = {each.name: values[each.name] for each in kernel.params if each.is_constexpr}
        signature = {name: "constexpr" if name in constants else type_of(values[name]) for name in names}
        options = {name: of for name, of in named.items() if name not in names}
        attributes = {
            (number,): [["tt.divisibility", 16]]
            for number, name in enumerate(names)
            if name not in constants and is_divisible(values[name])
        }
        source = ASTSource(kernel, signature, constants, attributes)
        made = triton.compile(source, GPUTarget("cuda", capability, 32), options=options)
        assert made.asm["cubin"]
        shared = made.metadata.shared
        assert shared <= SHARED_BYTES[capability], f"{kernel.__name__} takes {shared} bytes of shared memory"
        types = {of for of in signature.values() if of[0] == "*"}
        print(capability, kernel.__name__, *types, shared, "bytes shared", flush=True)

    JITFunction.run = run


def type_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        return "*" + name.replace("bfloat", "bf").replace("float", "fp").replace("int", "i")
    return "i32" if isinstance(value, int) else "fp32"


def is_divisible(value: object) -> bool:
    """Triton compiles anew for pointers and numbers that 16 divides: only then it loads many numbers at once."""
    number = value.data_ptr() if isinstance(value, torch.Tensor) else value
    return isinstance(number, int) and number % 16 == 0


def launch_all(dtypes: Sequence[torch.dtype]) -> None:
    operators = TritonOperators()
    for dtype in dtypes:
        x_TK, weight_NK = torch.zeros(3, 96, dtype=dtype), torch.zeros(80, 96, dtype=dtype)
        operators.product(x_TK, weight_NK, weight_NK[:, 0])
        operators.product(x_TK, torch.zeros(10256, 96, dtype=dtype), None)
        others = (torch.float32, (16, 64)), (torch.bfloat16, (16, 64))
        for kv_dtype, (block_size, head_size) in [*product([dtype], BLOCK_AND_HEAD_SIZES), *others]:
            keys_BpHd = torch.zeros(4, block_size, HEADS, head_size, dtype=kv_dtype)
            qkv_TE = torch.zeros(3, 3 * HEADS * head_size, dtype=dtype)
            numbers = torch.zeros(4, 4, dtype=torch.int32)
            operators.write(qkv_TE, keys_BpHd, keys_BpHd, numbers[0])
            tiles, spec = Tiles(numbers, numbers[0], 10), AttentionSpec(HEADS, HEADS, head_size, 0.3)
            operators.attend(qkv_TE, keys_BpHd, keys_BpHd, tiles, spec)
            if head_size == 128:  # once for each dtype
                operators.attend(qkv_TE, keys_BpHd, keys_BpHd, tiles, replace(spec, window=70))
    scores_RV, numbers_R = torch.zeros(2, 1009), torch.zeros(2)
    operators.weights(scores_RV, numbers_R, numbers_R)
    operators.running_sums(scores_RV)


if __name__ == "__main__":
    capabilities = [word for word in sys.argv[1:] if word.isdigit()]
    dtypes = [getattr(torch, word) for word in sys.argv[1:] if not word.isdigit()]
    for capability in map(int, capabilities):
        compile_launches(capability)
        launch_all(dtypes or DTYPES)
