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
from ppserve.model.compiled.settings import ForSettings, call_kernel
from ppserve.model.cpu.kernels.attention import (
    AttentionScratch,
    CacheShape,
    Heads,
    StepSlices,
    attend,
    rotate_heads,
    write_heads,
)
from ppserve.model.cpu.kernels.attention_tile import AttentionKernel
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
from ppserve.model.cpu.kernels.storage import Storage
from ppserve.model.cpu.kernels.tile_code import PANEL, MicroKernel

HEADS, EXPAND, PROJECT, READ, LINEAR, OUTPUT, NORM = range(1, 8)
"""Kinds of jobs."""

_PIECE_BYTES = 256 << 10
"""A thread multiplies so many bytes of weights with each tile of rows before it takes the next piece of work."""


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


@kernel
def multiply_rows(product, weights, step, y, job_queue, thread, num_threads):
    """Compute this thread's part of a product of the packed rows. Each thread computes its own partition in
    pieces, then pieces that are left of the others'. weights, step: the addresses of `Weights` and `Scratch`."""
    weights, scratch = _weights_at(weights), _scratch_at(step)
    barrier(job_queue, thread, num_threads)
    counts = begin_pieces(job_queue, thread, num_threads)
    panels, panel_bytes = weights.outputs // PANEL, weights.chunks * product.chunk_bytes
    at_once = panels
    if num_threads > 1:
        at_once = _PIECE_BYTES * -(-scratch.num_rows // scratch.tile_rows) // panel_bytes // 2 * 2 + 2
    for i in range(num_threads):
        other = ThreadContext(job_queue, (thread + i) % num_threads, num_threads)
        first, end = _partition(other, panels, 4)
        panel = first + at_once * next_piece(counts, other.thread)
        while panel < end:
            last = min(end, panel + at_once)
            multiply(product, weights, scratch, y, panel, last)
            panel = first + at_once * next_piece(counts, other.thread)
    barrier(job_queue, thread, num_threads)


@kernel
def attend_heads(attention, table, step, out, job_queue, thread, num_threads):
    """Do what HEADS is for, once queries, keys and values are computed: rotate and write this thread's heads, and
    attend with them. table: the job's."""
    context, qkv = ThreadContext(job_queue, thread, num_threads), _weights_at(table + _NORM)
    table += _NORM + _WEIGHTS
    scratch, slices = _scratch_at(step), _slices_at(step + _SCRATCH)
    cache = _cache_at(step + _SCRATCH + _SLICES)
    num_queries = cache.num_heads * cache.queries_per_kv_head
    first, end = _partition(context, num_queries, 1)
    first_kv, end_kv = _partition(context, cache.num_heads, 1)
    heads = Heads(
        qkv=scratch.y, qkv_stride=4 * qkv.outputs, out=out, out_stride=4 * num_queries * cache.head_size,
        first=first, end=end, first_kv=first_kv, end_kv=end_kv, first_cell=load_int(table, 0) * cache.layer_cells,
        scale=load_one(table + 8, 0), window=load_int(table, 3),
    )  # fmt: skip
    if load_int(table, 4):
        rotations = slices.rotations + 4 * load_int(table, 5) * slices.num_rows * cache.head_size
        rotate_heads(cache, slices, heads, rotations)
    own = _attention_scratch_at(step + _SCRATCH + _SLICES + _CACHE + _ATTENTION_SCRATCH * thread)
    write_heads(attention, cache, slices, heads)
    if cache.queries_per_kv_head > 1:  # a thread's heads read what others write
        barrier(job_queue, thread, num_threads)
    attend(attention, cache, slices, own, heads)


@inlined
def _multiply(kernel, weights, step, y, context):
    """Have `multiply_rows` compute a product. kernel: its address."""
    call_kernel(kernel, (weights, step, y, context.job_queue, context.thread, context.count))


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
def _heads(settings, kernels, table, step, x, out, context):
    """Do HEADS: the attention of this rank's own heads, into `out`, which is float32."""
    norm, qkv, scratch = _norm_at(table), _weights_at(table + _NORM), _scratch_at(step)
    cache = _cache_at(step + _SCRATCH + _SLICES)
    _norm_rows(settings.product, settings.stored, settings.single, norm, qkv, scratch, x, context)
    _multiply(kernels.multiply, table + _NORM, step, scratch.y, context)
    layer = table + _NORM + _WEIGHTS
    if load_int(layer, 2):
        num_queries, stride = cache.num_heads * cache.queries_per_kv_head, 4 * qkv.outputs
        first, end = _partition(context, num_queries, 1)
        first_kv, end_kv = _partition(context, cache.num_heads, 1)
        values, keys = _values(scratch, context), scratch.y + 4 * num_queries * cache.head_size
        num_rows, single = _slices_at(step + _SCRATCH).num_rows, settings.single
        _norm_heads(single, _norm_at(layer + 48), scratch.y, stride, first, end, num_rows, values)
        _norm_heads(single, _norm_at(layer + 48 + _NORM), keys, stride, first_kv, end_kv, num_rows, values)
    call_kernel(kernels.attend, (table, step, out, context.job_queue, context.thread, context.count))


@inlined
def _expand(settings, kernels, table, step, x, out, context):
    """Do EXPAND: this rank's own part of the inner rows, into `out`, which is float32."""
    norm, weights, scratch = _norm_at(table), _weights_at(table + _NORM), _scratch_at(step)
    _norm_rows(settings.product, settings.stored, settings.single, norm, weights, scratch, x, context)
    _multiply(kernels.multiply, table + _NORM, step, scratch.y, context)
    table += _NORM + _WEIGHTS
    activation, table = _activation_at(table), table + _ACTIVATION
    own, is_gated = load_int(table, 0), load_int(table, 1)
    first, end = _partition(context, scratch.num_rows, 1)
    for row in range(first, end):
        values, to = scratch.y + 4 * row * weights.outputs, out + 4 * row * own
        if is_gated:
            read_row(settings.single, values + 4 * own, own, to, 0)
            activate(activation, values, -(-own // PANEL) * PANEL)
            multiply_row(to, values, own)
        else:
            activate(activation, values, weights.outputs)
            read_row(settings.single, values, own, to, 0)


@inlined
def _project(settings, kernels, table, step, x, inner, out, context):
    """Do PROJECT: out = x + inner Wᵀ + b for this rank's own columns. inner: float32 rows, gathered from all
    ranks."""
    weights, scratch, stored = _weights_at(table), _scratch_at(step), settings.stored
    numbers = table + _WEIGHTS
    depth, width = load_int(numbers, 0), load_int(numbers, 1)
    column, own = load_int(numbers, 2), load_int(numbers, 3)
    _pack_rows(settings.product, settings.single, weights, scratch, inner, depth, context)
    _multiply(kernels.multiply, table, step, scratch.y, context)
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
def _linear(product, single, kernel, table, step, x, out, context):
    """Do LINEAR or OUTPUT: out = x Wᵀ + b. x: float32 rows."""
    depth = load_int(table + _WEIGHTS, 0)
    _pack_rows(product, single, _weights_at(table), _scratch_at(step), x, depth, context)
    _multiply(kernel, table, step, out, context)


@inlined
def _do(settings, kernels, job, table, step, x, inner, out, context):
    """Do one job of a list."""
    if job == HEADS:
        _heads(settings, kernels, table, step, x, inner, context)
    elif job == EXPAND:
        _expand(settings, kernels, table, step, x, inner, context)
    elif job == PROJECT:
        _project(settings, kernels, table, step, x, inner, out, context)
    elif job == READ:
        norm, weights, scratch = _norm_at(table), _weights_at(table + _NORM), _scratch_at(step)
        _norm_and_pack_rows(settings.head, settings.stored, norm, weights, scratch, x, context)
        _multiply(kernels.multiply_head, table + _NORM, step, out, context)
    elif job == LINEAR:
        _linear(settings.product, settings.single, kernels.multiply, table, step, x, out, context)
    elif job == OUTPUT:
        _linear(settings.head, settings.single, kernels.multiply_head, table, step, x, out, context)
    else:
        _norm_alone(settings.stored, settings.single, table, step, x, out, context)


class _Kinds(NamedTuple):
    """What `work` is compiled for. product, head: as in `multiply_rows`; head: that of the LM head. stored: how
    hidden states are kept. single: the same for float32."""

    product: MicroKernel
    head: MicroKernel
    stored: Storage
    single: Storage


class _Kernels(NamedTuple):
    """The addresses of the kernels that `work` calls."""

    multiply: int
    multiply_head: int
    attend: int


@kernel
def work(
    product, head, stored, single, multiply, multiply_head, attend, job_queue, thread, num_threads, jobs, num_jobs,
    step, x, inner, out,
):  # fmt: skip
    """What a thread of a `ThreadPool` runs. The first arguments are those of `_Kinds` and `_Kernels`.

    The numbers of a job are addresses, and one count: a list of pairs (kind of job, its table), how many pairs,
    the step's table, the rows that come in, the rows between two jobs (0: in scratch), the rows that go out. The
    jobs are done one after the other.
    """
    settings = _Kinds(product, head, stored, single)
    kernels = _Kernels(multiply, multiply_head, attend)
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
            _do(settings, kernels, kind, table, step, x, inner, out, context)
            if kind != EXPAND or number + 1 == num_jobs:  # PROJECT packs the rows that the same thread activated
                barrier(job_queue, thread, num_threads)
            if kind == PROJECT:
                x = out
        if thread == 0:
            return


def make_work(product: MicroKernel, head: MicroKernel, attention: AttentionKernel, stored: Storage) -> ForSettings:
    """Return `work` for these settings, with the kernels that it calls."""
    of_product = ForSettings(multiply_rows, product)
    of_head = of_product if head == product else ForSettings(multiply_rows, head)
    attend_with = ForSettings(attend_heads, attention)
    return ForSettings(work, product, head, stored, Storage("float32"), calls=(of_product, of_head, attend_with))
