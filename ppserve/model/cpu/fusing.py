"""From the parts of an attention or MLP sublayer to the calls of kernels that compute it: one where the rank is
alone, two where tensor ranks share it, one for all sublayers of a stage where there is a way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ppserve.model.backend import AttentionParts, MLPParts, Sublayer
from ppserve.model.cpu.activations import CpuActivation
from ppserve.model.cpu.kernels.products import Weights
from ppserve.model.cpu.kernels.work import ATTENTION, EXPAND, HEADS, MLP, as_table
from ppserve.model.cpu.linear import PackedLinear
from ppserve.model.cpu.norm import CpuNorm
from ppserve.model.cpu.scratch_memory import ScratchMemory
from ppserve.model.cpu.shared_sublayers import SharedSublayer, SharedSublayers
from ppserve.model.cpu.sublayers import FusedSublayers
from ppserve.model.cpu.thread_pool import ThreadPool


def attention_sublayer(parts: AttentionParts, thread_pool: ThreadPool, scratch_memory: ScratchMemory) -> Sublayer:
    norm, qkv, proj = parts.norm, parts.qkv, parts.proj
    assert isinstance(norm, CpuNorm)
    assert isinstance(qkv, PackedLinear)
    assert isinstance(proj, PackedLinear)
    first, second = _weights(scratch_memory, qkv, proj)
    layer, kept = (parts.own, np.float32(parts.scale)), (norm, qkv, proj)
    if len(parts.columns.widths) == 1:
        table = as_table(norm.seen_by_kernels, first, second, layer)
        return FusedSublayers([(ATTENTION, table)], kept, thread_pool)
    table = as_table(norm.seen_by_kernels, first, layer)
    return SharedSublayer(HEADS, table, second, (parts.context, parts.columns), kept, thread_pool)


def mlp_sublayer(parts: MLPParts, thread_pool: ThreadPool, scratch_memory: ScratchMemory) -> Sublayer:
    norm, expand, contract, activate = parts.norm, parts.expand, parts.contract, parts.activate
    assert isinstance(norm, CpuNorm)
    assert isinstance(expand, PackedLinear)
    assert isinstance(contract, PackedLinear)
    assert isinstance(activate, CpuActivation)
    (first, second), kept = _weights(scratch_memory, expand, contract), (norm, expand, contract)
    if len(parts.columns.widths) == 1:
        table = as_table(norm.seen_by_kernels, first, second, activate.seen_by_kernels)
        return FusedSublayers([(MLP, table)], kept, thread_pool)
    table = as_table(norm.seen_by_kernels, first, activate.seen_by_kernels, (parts.inner.width,))
    return SharedSublayer(EXPAND, table, second, (parts.inner, parts.columns), kept, thread_pool)


def joined_sublayers(sublayers: Sequence[Sublayer | None]) -> Sublayer | None:
    if alone := [each for each in sublayers if isinstance(each, FusedSublayers)]:
        return FusedSublayers.joined(alone) if len(alone) == len(sublayers) else None
    shared = [each for each in sublayers if isinstance(each, SharedSublayer)]
    return SharedSublayers(shared) if shared and len(shared) == len(sublayers) else None


def _weights(scratch_memory: ScratchMemory, *linears: PackedLinear) -> list[Weights]:
    """Of a sublayer's linear layers, for whose results there is room."""
    weights = [linear.packed.seen_by_kernels for linear in linears]
    for each in weights:
        scratch_memory.fit_results(each)
    return weights
