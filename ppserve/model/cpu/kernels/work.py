"""What the threads of a stage do together: jobs, from which attention, MLP, LM head and linear layers are made.

    job      the threads divide
    HEADS    rows: norm, pack | outputs: product | heads: norm, rotate, write keys and values (|) attend
    EXPAND   rows: norm, pack | outputs: product | rows: activate
    PROJECT  rows: pack | outputs: product | rows: add to the hidden states
    READ     rows: norm, pack | outputs: product of the LM head
    LINEAR   rows: pack | outputs: product
    OUTPUT   rows: pack | outputs: product of the LM head
    NORM     rows: norm

At each `|` the threads wait for each other. They do so at `(|)` only where several heads of queries read the same
keys. Rows, outputs and heads are divided evenly.

An attention is HEADS and PROJECT, an MLP is EXPAND and PROJECT. Between the two, tensor ranks gather. PROJECT
writes the hidden states with which the next job begins. The arguments of a job are in tables of int64 numbers,
which Python makes with `as_table`: one for each job, made once, and one for each step.

T rows, D width.
"""
# mypy: ignore-errors
# (numba types these functions from their arguments)

from __future__ import annotations

from typing import NamedTuple, get_type_hints

import numpy as np
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from ppserve.model.compiled.jit import inlined, kernel
from ppserve.model.compiled.lanes import load_int, load_one
from ppserve.model.compiled.llvm import I64
from ppserve.model.cpu.kernels.attention import (
    AttentionScratch,
    CacheShape,
    Heads,
    StepSlices,
    attend,
    rotate_heads,
    write_heads,
)
from ppserve.model.cpu.kernels.job_queue import JOB, await_job, barrier, begin_pieces, next_piece, publish
from ppserve.model.cpu.kernels.memory import address, aligned
from ppserve.model.cpu.kernels.products import Scratch, Weights, multiply
from ppserve.model.cpu.kernels.rows import (
    Activation,
    Norm,
    activate,
    add_row,
    multiply_row,
    normalise,
    pack_row,
    read_row,
)
from ppserve.model.cpu.kernels.tile_code import PANEL

HEADS, EXPAND, PROJECT, READ, LINEAR, OUTPUT, NORM = range(1, 8)
"""Kinds of jobs."""

_PIECE_BYTES = 256 << 10
"""For each tile of rows, a thread multiplies so many bytes of weights before it takes the next piece of work."""


def as_table(*records: tuple[int | np.float32, ...]) -> NDArray[np.int64]:
    """Return the fields of all records in one array. A float32 takes the low half of its number."""
    fields = [field for record in records for field in record]
    table = aligned(len(fields), np.int64)
    table[:] = [int(field.view(np.uint32)) if isinstance(field, np.float32) else field for field in fields]
    return table


class Jobs:
    """A list of jobs as `work` takes it, which keeps the memory that the jobs use.

    jobs: kinds and tables. kept: the objects whose addresses the tables have.
    """

    def __init__(self, *jobs: tuple[int, NDArray[np.int64]], kept: object) -> None:
        self._list = as_table(*((kind, address(table)) for kind, table in jobs))
        self._kept = jobs, kept
        self.address, self.count = address(self._list), len(jobs)


_NORM, _WEIGHTS, _ACTIVATION, _SCRATCH, _SLICES, _CACHE, _ATTENTION_SCRATCH = (
    8 * len(record._fields)
    for record in (Norm, Weights, Activation, Scratch, StepSlices, CacheShape, AttentionScratch)
)
"""How many bytes each kind of record takes in a table."""


def _record_at(record):
    """Return an intrinsic that reads this record from a table at an address."""
    kinds = [types.float32 if hint is np.float32 else types.int64 for hint in get_type_hints(record).values()]
    result = types.BaseTuple.from_types(kinds, record)

    def read(typing, table):
        def generate(context, builder, signature, arguments):
            fields = []
            for number, kind in enumerate(kinds):
                place = builder.add(arguments[0], I64(8 * number))
                pointer = builder.inttoptr(place, context.get_value_type(kind).as_pointer())
                fields.append(builder.load(pointer))
            return context.make_tuple(builder, result, fields)

        return result(types.intp), generate

    return intrinsic(read)


_norm_at, _weights_at, _activation_at, _scratch_at, _slices_at, _cache_at, _attention_scratch_at = (
    _record_at(record) for record in (Norm, Weights, Activation, Scratch, StepSlices, CacheShape, AttentionScratch)
)


class ThreadContext(NamedTuple):
    """A thread of a stage: the address of the job queue, the thread's number, and how many threads there are."""

    job_queue: int
    thread: int
    count: int


@inlined
def _partition(context, size, least):
    """Return where a thread's part of `size` begins and ends, in multiples of `least`."""
    parts, thread = size // least, context.thread
    return parts * thread // context.count * least, parts * (thread + 1) // context.count * least


@inlined
def _values(scratch, context):
    return scratch.values + context.thread * scratch.values_stride


@inlined
def _multiply(product, weights, scratch, y, context):
    """Compute this thread's part of a product of the packed rows. Each thread computes its own partition in
    pieces, then pieces that are left of the others'."""
    barrier(context.job_queue, context.thread, context.count)
    counts = begin_pieces(context.job_queue, context.thread, context.count)
    panels, panel_bytes = weights.outputs // PANEL, weights.chunks * product.chunk_bytes
    at_once = panels
    if context.count > 1:
        at_once = _PIECE_BYTES * -(-scratch.num_rows // scratch.tile_rows) // panel_bytes // 2 * 2 + 2
    for i in range(context.count):
        other = ThreadContext(context.job_queue, (context.thread + i) % context.count, context.count)
        first, end = _partition(other, panels, 4)
        panel = first + at_once * next_piece(counts, other.thread)
        while panel < end:
            last = min(end, panel + at_once)
            multiply(product, weights, scratch, y, panel, last)
            panel = first + at_once * next_piece(counts, other.thread)
    barrier(context.job_queue, context.thread, context.count)


@inlined
def _norm_rows(product, stored, single, norm, weights, scratch, x, context):
    """Norm and pack this thread's rows. A norm without weights means that they are normed already, and float32."""
    if norm.weight == 0:
        _pack_rows(product, single, weights, scratch, x, norm.width, context)
    else:
        _norm_and_pack_rows(product, stored, norm, weights, scratch, x, context)


@inlined
def _norm_and_pack_rows(product, stored, norm, weights, scratch, x, context):
    first, end = _partition(context, scratch.num_rows, 1)
    values, padded = _values(scratch, context), weights.chunks * product.chunk_inputs
    for row in range(first, end):
        read_row(stored, x + row * norm.width * stored.element_bytes, norm.width, values, padded)
        normalise(norm, values)
        pack_row(product, values, scratch, weights.chunks, row)


@inlined
def _pack_rows(product, single, weights, scratch, x, depth, context):
    """Pack this thread's rows of `depth` float32 numbers. Rows that fill whole chunks are not copied before."""
    first, end = _partition(context, scratch.num_rows, 1)
    values, padded = _values(scratch, context), weights.chunks * product.chunk_inputs
    for row in range(first, end):
        source = x + 4 * row * depth
        if depth < padded:
            read_row(single, source, depth, values, padded)
            source = values
        pack_row(product, source, scratch, weights.chunks, row)


@inlined
def _norm_heads(single, norm, rows, stride, first, end, num_rows, values):
    """Norm a thread's heads of all rows, in place. rows: the address of the first row's first head."""
    padded = -(-norm.width // PANEL) * PANEL
    for row in range(num_rows):
        for head in range(first, end):
            place = rows + row * stride + 4 * head * norm.width
            read_row(single, place, norm.width, values, padded)
            normalise(norm, values)
            read_row(single, values, norm.width, place, 0)


@inlined
def _heads(product, attention, stored, single, table, step, x, out, context):
    """Do HEADS: the attention of this rank's own heads, into `out`, which is float32."""
    norm, qkv, scratch = _norm_at(table), _weights_at(table + _NORM), _scratch_at(step)
    table += _NORM + _WEIGHTS
    cache = _cache_at(step + _SCRATCH + _SLICES)
    _norm_rows(product, stored, single, norm, qkv, scratch, x, context)
    _multiply(product, qkv, scratch, scratch.y, context)
    num_queries, stride = cache.num_heads * cache.queries_per_kv_head, 4 * qkv.outputs
    first, end = _partition(context, num_queries, 1)
    first_kv, end_kv = _partition(context, cache.num_heads, 1)
    first_cell, scale = load_int(table, 0) * cache.layer_cells, load_one(table + 8, 0)
    rows = scratch.y, stride, out, 4 * num_queries * cache.head_size
    heads = Heads(*rows, first, end, first_kv, end_kv, first_cell, scale, load_int(table, 3))
    slices = _slices_at(step + _SCRATCH)
    if load_int(table, 2):
        values, keys = _values(scratch, context), scratch.y + 4 * num_queries * cache.head_size
        _norm_heads(single, _norm_at(table + 48), scratch.y, stride, first, end, slices.num_rows, values)
        _norm_heads(single, _norm_at(table + 48 + _NORM), keys, stride, first_kv, end_kv, slices.num_rows, values)
    if load_int(table, 4):
        rotations = slices.rotations + 4 * load_int(table, 5) * slices.num_rows * cache.head_size
        rotate_heads(cache, slices, heads, rotations)
    own = _attention_scratch_at(step + _SCRATCH + _SLICES + _CACHE + _ATTENTION_SCRATCH * context.thread)
    write_heads(attention, cache, slices, heads)
    if cache.queries_per_kv_head > 1:  # a thread's heads read what others write
        barrier(context.job_queue, context.thread, context.count)
    attend(attention, cache, slices, own, heads)


@inlined
def _expand(product, stored, single, table, step, x, out, context):
    """Do EXPAND: this rank's own part of the inner rows, into `out`, which is float32."""
    norm, weights, scratch = _norm_at(table), _weights_at(table + _NORM), _scratch_at(step)
    table += _NORM + _WEIGHTS
    activation, table = _activation_at(table), table + _ACTIVATION
    own, is_gated = load_int(table, 0), load_int(table, 1)
    _norm_rows(product, stored, single, norm, weights, scratch, x, context)
    _multiply(product, weights, scratch, scratch.y, context)
    first, end = _partition(context, scratch.num_rows, 1)
    for row in range(first, end):
        values, to = scratch.y + 4 * row * weights.outputs, out + 4 * row * own
        if is_gated:
            read_row(single, values + 4 * own, own, to, 0)
            activate(activation, values, -(-own // PANEL) * PANEL)
            multiply_row(to, values, own)
        else:
            activate(activation, values, weights.outputs)
            read_row(single, values, own, to, 0)


@inlined
def _project(product, stored, single, table, step, x, inner, out, context):
    """Do PROJECT: out = x + inner Wᵀ + b for this rank's own columns. inner: float32 rows, gathered from all
    ranks."""
    weights, scratch = _weights_at(table), _scratch_at(step)
    table += _WEIGHTS
    depth, width, column, own = load_int(table, 0), load_int(table, 1), load_int(table, 2), load_int(table, 3)
    _pack_rows(product, single, weights, scratch, inner, depth, context)
    _multiply(product, weights, scratch, scratch.y, context)
    first, end = _partition(context, scratch.num_rows, 1)
    size = stored.element_bytes
    for row in range(first, end):
        source, to = x + (row * width + column) * size, out + row * own * size
        add_row(stored, source, own, scratch.y + 4 * row * weights.outputs, to)


@inlined
def _norm_alone(stored, single, table, step, x, out, context):
    """Do NORM: out = norm(x), in float32. x: hidden states, or float32 rows."""
    norm, scratch, is_single = _norm_at(table), _scratch_at(step), load_int(table + _NORM, 0)
    first, end = _partition(context, scratch.num_rows, 1)
    values, padded = _values(scratch, context), -(-norm.width // PANEL) * PANEL
    for row in range(first, end):
        if is_single:
            read_row(single, x + 4 * row * norm.width, norm.width, values, padded)
        else:
            read_row(stored, x + row * norm.width * stored.element_bytes, norm.width, values, padded)
        normalise(norm, values)
        read_row(single, values, norm.width, out + 4 * row * norm.width, 0)


@inlined
def _linear(product, single, table, step, x, out, context):
    """Do LINEAR or OUTPUT: out = x Wᵀ + b. x: float32 rows."""
    weights, scratch = _weights_at(table), _scratch_at(step)
    _pack_rows(product, single, weights, scratch, x, load_int(table + _WEIGHTS, 0), context)
    _multiply(product, weights, scratch, out, context)


@inlined
def _do(product, head, attention, stored, single, job, table, step, x, inner, out, context):
    """Do one job of a list."""
    if job == HEADS:
        _heads(product, attention, stored, single, table, step, x, inner, context)
    elif job == EXPAND:
        _expand(product, stored, single, table, step, x, inner, context)
    elif job == PROJECT:
        _project(product, stored, single, table, step, x, inner, out, context)
    elif job == READ:
        norm, weights, scratch = _norm_at(table), _weights_at(table + _NORM), _scratch_at(step)
        _norm_and_pack_rows(head, stored, norm, weights, scratch, x, context)
        _multiply(head, weights, scratch, out, context)
    elif job == LINEAR:
        _linear(product, single, table, step, x, out, context)
    elif job == OUTPUT:
        _linear(head, single, table, step, x, out, context)
    else:
        _norm_alone(stored, single, table, step, x, out, context)


@kernel
def work(
    product, head, attention, stored, single, job_queue, thread, num_threads, jobs, num_jobs, step, x, inner, out
) -> None:
    """Run one thread of a `ThreadPool`. It does the jobs of a list one after the other.

    product, head: the micro-kernels of the layers and of the LM head. stored: how hidden states are stored.
    single: the storage of float32. jobs: the address of a list of num_jobs pairs (kind of job, address of its
    table). step: the address of the step's table. x, out: the addresses of the rows that are read and written.
    inner: the address of the rows between two jobs; 0: they are in scratch memory.
    """
    context, done, job = ThreadContext(job_queue, thread, num_threads), 0, job_queue + 8 * JOB
    if thread == 0:
        publish(job_queue, (jobs, num_jobs, step, x, inner, out))
    while True:
        if thread > 0:
            await_job(job_queue, done)
            done += 1
        jobs, num_jobs, step = load_int(job, 0), load_int(job, 1), load_int(job, 2)
        x, inner, out = load_int(job, 3), load_int(job, 4), load_int(job, 5)
        if jobs == 0:
            return
        if inner == 0:
            inner = _scratch_at(step).inner
        for number in range(num_jobs):
            kind, table = load_int(jobs, 2 * number), load_int(jobs, 2 * number + 1)
            _do(product, head, attention, stored, single, kind, table, step, x, inner, out, context)
            if kind != EXPAND or number + 1 == num_jobs:  # PROJECT packs the rows that the same thread activated
                barrier(job_queue, thread, num_threads)
            if kind == PROJECT:
                x = out
        if thread == 0:
            return
