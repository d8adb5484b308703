"""What the threads of a stage do together: attention and MLP sublayers, one or several in a call, linear layers.

    attention   rows: norm, pack | product | heads: keep keys and values, attend | rows: pack | product | rows: add
    MLP         rows: norm, pack | product | rows: activate, pack | product | rows: add

A tensor rank's sublayers end where the rows of all ranks are needed: HEADS and EXPAND are the above up to `rows:
pack` before the second product, PROJECT is the rest. The rows of all ranks come by GATHER and COMPLETE, or by
Python. READ is the final norm and the LM head, of some rows.

At each bar the threads meet. Rows, outputs and heads are shared out evenly. What a job works on stands in tables
of int64 numbers, which Python fills with `as_table`: one for each sublayer, for ever, and one for each step.

T rows, D width.
"""
# mypy: ignore-errors
# (numba types these functions from their arguments; mypy cannot see through its intrinsics)

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ppserve.model.compiled.jit import inlined, kernel
from ppserve.model.compiled.lanes import load_int, load_one, store_int
from ppserve.model.cpu.kernels.activation import Activation, activate
from ppserve.model.cpu.kernels.attention import (
    AttentionScratch,
    CacheLayer,
    Heads,
    StepSlices,
    attend,
    write_heads,
)
from ppserve.model.cpu.kernels.exchange import own_room, swap
from ppserve.model.cpu.kernels.job_queue import ARGUMENTS, LOST, await_job, barrier, open_shares, take_piece
from ppserve.model.cpu.kernels.memory import address, aligned
from ppserve.model.cpu.kernels.products import PackedRows, Weights, multiply
from ppserve.model.cpu.kernels.rows import Norm, add_row, normalise, pack_row, read_row
from ppserve.model.cpu.kernels.tile_code import CHUNK_BYTES, PANEL

ATTENTION, MLP, COMPLETE, LINEAR, ATTEND, HEADS, EXPAND, PROJECT, READ, GATHER = range(1, 11)
"""Kinds of jobs. The first three put out hidden states, for the next one to begin with."""


_PIECE_BYTES = 256 << 10
"""Of weights: what a thread multiplies before it looks for more work, for each tile of rows."""


class Scratch(NamedTuple):
    """What the threads of a stage write while they work; addresses, of a step's size. num_rows: of the step.

    words, scales: packed rows. y: results of products. mixed: those of attention, `mixed_stride` bytes a row.
    values: a row for each thread, `values_stride` bytes apart.
    """

    num_rows: int
    words: int
    scales: int
    y: int
    mixed: int
    mixed_stride: int
    values: int
    values_stride: int


class CacheShape(NamedTuple):
    """The keys and values of a stage; addresses, and bytes of one layer."""

    keys: int
    values: int
    key_layer: int
    value_layer: int
    num_heads: int
    head_size: int
    block_size: int
    key_cell: int
    value_cell: int


def as_table(*records: tuple[int | np.float32, ...]) -> NDArray[np.int64]:
    """The fields of all records one after the other; a float32 in the low half of its number."""
    fields = [field for record in records for field in record]
    table = aligned(len(fields), np.int64)
    table[:] = [int(field.view(np.uint32)) if isinstance(field, np.float32) else field for field in fields]
    return table


def jobs_of(*jobs: tuple[int, NDArray[np.int64]]) -> NDArray[np.int64]:
    """Kinds of jobs and their tables, as `work` takes them; whoever uses them keeps the tables."""
    return as_table(*((kind, address(table)) for kind, table in jobs))


_NORM, _WEIGHTS, _ROOM, _SLICES, _CACHE, _ATTENTION_ROOM = (
    8 * len(record._fields) for record in (Norm, Weights, Scratch, StepSlices, CacheShape, AttentionScratch)
)
"""Bytes of records in a table."""


@inlined
def _float(table, index):
    return load_one(table + 8 * index, 0)


@inlined
def _norm_at(t):
    return Norm(load_int(t, 0), load_int(t, 1), load_int(t, 2), _float(t, 3))


@inlined
def _weights_at(t):
    return Weights(
        load_int(t, 0), load_int(t, 1), load_int(t, 2), load_int(t, 3), load_int(t, 4), load_int(t, 5)
    )  # fmt: skip


@inlined
def _room_at(t):
    return Scratch(
        load_int(t, 0), load_int(t, 1), load_int(t, 2), load_int(t, 3), load_int(t, 4), load_int(t, 5),
        load_int(t, 6), load_int(t, 7),
    )  # fmt: skip


@inlined
def _slices_at(t):
    return StepSlices(
        load_int(t, 0), load_int(t, 1), load_int(t, 2), load_int(t, 3), load_int(t, 4), load_int(t, 5),
        load_int(t, 6), load_int(t, 7),
    )  # fmt: skip


@inlined
def _layer_at(t, layer, scale):
    return CacheLayer(
        load_int(t, 0) + layer * load_int(t, 2), load_int(t, 1) + layer * load_int(t, 3), load_int(t, 4),
        load_int(t, 5), load_int(t, 6), load_int(t, 7), load_int(t, 8), scale,
    )  # fmt: skip


@inlined
def _attention_room_at(t, thread):
    """Each thread has its own, one after the other."""
    t += _ATTENTION_ROOM * thread
    return AttentionScratch(
        load_int(t, 0), load_int(t, 1), load_int(t, 2), load_int(t, 3), load_int(t, 4), load_int(t, 5)
    )  # fmt: skip


class ThreadContext(NamedTuple):
    """A thread, and how many there are."""

    job_queue: int
    thread: int
    count: int


@inlined
def _share_of(context, thread, size, least):
    """A thread's part of `size`, in multiples of `least`."""
    parts = size // least
    return parts * thread // context.count * least, parts * (thread + 1) // context.count * least


@inlined
def _share(context, size, least):
    return _share_of(context, context.thread, size, least)


@inlined
def _packed(product, scratch):
    return PackedRows(scratch.words, scratch.scales, scratch.num_rows, product.tile_rows(scratch.num_rows))


@inlined
def _values(scratch, context):
    return scratch.values + context.thread * scratch.values_stride


@inlined
def _first_panel(weights, context):
    """Where this thread begins to read these weights."""
    first, _ = _share(context, weights.outputs // PANEL, 4)
    return weights.panels + first * weights.chunks * CHUNK_BYTES


@inlined
def _multiply(product, weights, scratch, y, context, following):
    """The threads' common product of the packed rows: each computes its share in pieces, then what is left of the
    others'."""
    barrier(context.job_queue, context.thread, context.count)
    counts = open_shares(context.job_queue, context.thread, context.count)
    rows, panels, panel_bytes = _packed(product, scratch), weights.outputs // PANEL, weights.chunks * CHUNK_BYTES
    at_once = panels
    if context.count > 1:
        at_once = _PIECE_BYTES * -(-rows.count // rows.tile_rows) // panel_bytes // 2 * 2 + 2
    for i in range(context.count):
        thread = (context.thread + i) % context.count
        first, end = _share_of(context, thread, panels, 4)
        panel = first + at_once * take_piece(counts, thread)
        while panel < end:
            last = min(end, panel + at_once)
            then = weights.panels + last * panel_bytes if last < end else following
            multiply(product, weights, rows, y, panel, last, then)
            panel = first + at_once * take_piece(counts, thread)
    barrier(context.job_queue, context.thread, context.count)


@inlined
def _norm_rows(product, stored, norm, weights, scratch, x, rows, context):
    """Norm and pack this thread's rows. rows: the numbers of those that are meant; 0: all, in their order."""
    first, end = _share(context, scratch.num_rows, 1)
    values, padded = _values(scratch, context), weights.chunks * PANEL * product.inputs
    for row in range(first, end):
        number = load_int(rows, row) if rows else row
        read_row(stored, x + number * norm.width * stored.element_bytes, norm.width, values, padded)
        normalise(norm, values)
        pack_row(product, values, _packed(product, scratch), weights.chunks, row)


class Columns(NamedTuple):
    """Those of a row that are computed here. width: of the whole row."""

    width: int
    first: int
    own: int


@inlined
def _add_rows(stored, columns, scratch, x, stride, out, context):
    """out = x + y for this thread's rows. x: whole rows; out: the columns."""
    first, end = _share(context, scratch.num_rows, 1)
    size = stored.element_bytes
    for row in range(first, end):
        source, to = x + (row * columns.width + columns.first) * size, out + row * columns.own * size
        add_row(stored, source, columns.own, scratch.y + row * stride, to)


@inlined
def _attend_heads(attention, cache, step, qkv, qkv_stride, mixed, mixed_stride, context):
    """Attention of this thread's heads."""
    first, end = _share(context, cache.num_heads, 1)
    heads = Heads(qkv, qkv_stride, mixed, mixed_stride, first, end)
    slices = _slices_at(step + _ROOM)
    own = _attention_room_at(step + _ROOM + _SLICES + _CACHE, context.thread)
    write_heads(attention, cache, slices, own, heads)
    attend(attention, cache, slices, own, heads)


@inlined
def _attention(product, attention, stored, table, step, x, out, context, following):
    norm, qkv, proj = _norm_at(table), _weights_at(table + _NORM), _weights_at(table + _NORM + _WEIGHTS)
    table += _NORM + 2 * _WEIGHTS
    scratch, cache = _room_at(step), _layer_at(step + _ROOM + _SLICES, load_int(table, 0), _float(table, 1))
    _norm_rows(product, stored, norm, qkv, scratch, x, 0, context)
    _multiply(product, qkv, scratch, scratch.y, context, _first_panel(proj, context))
    _attend_heads(attention, cache, step, scratch.y, 4 * qkv.outputs, scratch.mixed, scratch.mixed_stride, context)
    barrier(context.job_queue, context.thread, context.count)
    first, end = _share(context, scratch.num_rows, 1)
    for row in range(first, end):
        pack_row(product, scratch.mixed + row * scratch.mixed_stride, _packed(product, scratch), proj.chunks, row)
    _multiply(product, proj, scratch, scratch.y, context, following)
    _add_rows(stored, Columns(norm.width, 0, norm.width), scratch, x, 4 * proj.outputs, out, context)


@inlined
def _mlp(product, stored, table, step, x, out, context, following):
    norm, expand, contract = _norm_at(table), _weights_at(table + _NORM), _weights_at(table + _NORM + _WEIGHTS)
    table += _NORM + 2 * _WEIGHTS
    activation = Activation(load_int(table, 0), _float(table, 1), _float(table, 2))
    scratch = _room_at(step)
    _norm_rows(product, stored, norm, expand, scratch, x, 0, context)
    _multiply(product, expand, scratch, scratch.y, context, _first_panel(contract, context))
    first, end = _share(context, scratch.num_rows, 1)
    for row in range(first, end):
        values = scratch.y + 4 * row * expand.outputs
        activate(activation, values, expand.outputs)
        pack_row(product, values, _packed(product, scratch), contract.chunks, row)
    _multiply(product, contract, scratch, scratch.y, context, following)
    _add_rows(stored, Columns(norm.width, 0, norm.width), scratch, x, 4 * contract.outputs, out, context)


@inlined
def _heads(product, attention, stored, table, step, x, out, context):
    """Attention of a rank's own heads; out: float32."""
    norm, qkv, scratch = _norm_at(table), _weights_at(table + _NORM), _room_at(step)
    table += _NORM + _WEIGHTS
    cache = _layer_at(step + _ROOM + _SLICES, load_int(table, 0), _float(table, 1))
    _norm_rows(product, stored, norm, qkv, scratch, x, 0, context)
    _multiply(product, qkv, scratch, scratch.y, context, 0)
    width = 4 * cache.num_heads * cache.head_size
    _attend_heads(attention, cache, step, scratch.y, 4 * qkv.outputs, out, width, context)


@inlined
def _expand(product, stored, single, table, step, x, out, context):
    """A rank's own part of the inner rows; out: float32."""
    norm, weights, scratch = _norm_at(table), _weights_at(table + _NORM), _room_at(step)
    table += _NORM + _WEIGHTS
    activation, own = Activation(load_int(table, 0), _float(table, 1), _float(table, 2)), load_int(table, 3)
    _norm_rows(product, stored, norm, weights, scratch, x, 0, context)
    _multiply(product, weights, scratch, scratch.y, context, 0)
    first, end = _share(context, scratch.num_rows, 1)
    for row in range(first, end):
        values = scratch.y + 4 * row * weights.outputs
        activate(activation, values, weights.outputs)
        read_row(single, values, own, out + 4 * row * own, 0)


@inlined
def _linear(product, single, table, step, x, y, context):
    """Packs float32 rows and multiplies them; table: the weights, then the number of inputs."""
    weights, depth, scratch = _weights_at(table), load_int(table + _WEIGHTS, 0), _room_at(step)
    first, end = _share(context, scratch.num_rows, 1)
    values, padded = _values(scratch, context), weights.chunks * PANEL * product.inputs
    for row in range(first, end):
        read_row(single, x + 4 * row * depth, depth, values, padded)
        pack_row(product, values, _packed(product, scratch), weights.chunks, row)
    _multiply(product, weights, scratch, y, context, 0)


@inlined
def _project(product, stored, single, table, step, x, out, rows, context):
    """The second product and the residual, of a rank's own columns. rows: float32 of all ranks."""
    weights = _weights_at(table)
    _linear(product, single, table, step, rows, _room_at(step).y, context)
    table += _WEIGHTS
    columns = Columns(load_int(table, 1), load_int(table, 2), load_int(table, 3))
    _add_rows(stored, columns, _room_at(step), x, 4 * weights.outputs, out, context)


@inlined
def _read(product, stored, table, step, x, y, rows, context):
    norm, weights, scratch = _norm_at(table), _weights_at(table + _NORM), _room_at(step)
    _norm_rows(product, stored, norm, weights, scratch, x, rows, context)
    _multiply(product, weights, scratch, y, context, 0)


@kernel
def work(product, attention, stored, single, job_queue, thread, num_threads) -> None:
    """As `team.Work`. stored: how hidden states are kept. single: the same for float32.

    The arguments on the job queue are addresses, and one count: a list of pairs (kind of job, its table), how many
    pairs, the step's table, the rows that come in, the rows that go out, for PROJECT the rows of all ranks (for
    READ the numbers of its rows), and a tensor rank's side of the exchange (0: jobs do not gather). The jobs are
    done one after the other; the rows that come in are the hidden states that a job before has put out.
    """
    context, done = ThreadContext(job_queue, thread, num_threads), 0
    while True:
        if thread > 0:
            await_job(job_queue, done)
            done += 1
        arguments = job_queue + 8 * ARGUMENTS
        jobs, num_jobs, step, x, out, rows, side = (
            load_int(arguments, 0), load_int(arguments, 1), load_int(arguments, 2), load_int(arguments, 3),
            load_int(arguments, 4), load_int(arguments, 5), load_int(arguments, 6),
        )  # fmt: skip
        if jobs == 0:
            return
        for number in range(num_jobs):
            job, table, following = load_int(jobs, 2 * number), load_int(jobs, 2 * number + 1), 0
            own = own_room(side) if side else out
            if number + 1 < num_jobs and not side:
                following = _first_panel(_weights_at(load_int(jobs, 2 * number + 3) + _NORM), context)
            if job == ATTENTION:
                _attention(product, attention, stored, table, step, x, out, context, following)
            elif job == MLP:
                _mlp(product, stored, table, step, x, out, context, following)
            elif job == LINEAR:
                _linear(product, single, table, step, x, out, context)
            elif job == ATTEND:
                cache = _layer_at(step + _ROOM + _SLICES, load_int(table, 0), _float(table, 1))
                width = 4 * cache.num_heads * cache.head_size
                _attend_heads(attention, cache, step, x, 3 * width, out, width, context)
            elif job == HEADS:
                _heads(product, attention, stored, table, step, x, own, context)
            elif job == EXPAND:
                _expand(product, stored, single, table, step, x, own, context)
            elif job == PROJECT:
                _project(product, stored, single, table, step, x, own, rows, context)
            elif job == READ:
                _read(product, stored, table, step, x, out, rows, context)
            elif thread == 0:  # the first of a thread context gathers for all
                to, element_bytes = (rows, 4) if job == GATHER else (out, stored.element_bytes)
                store_int(job_queue, LOST, not swap(side, table, element_bytes, _room_at(step).num_rows, to))
            barrier(job_queue, thread, num_threads)
            x = out if job <= COMPLETE else x
            if job in (GATHER, COMPLETE) and load_int(job_queue, LOST):
                break  # what remains would be computed from no rows, and its keys and values kept
        if thread == 0:
            return
