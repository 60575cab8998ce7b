"""Tiles that programs share evenly, in Gluon: a tile may begin in one program and end in another.

A unit is a piece of a tile's sum, and units are counted tile by tile; program p of P has units p * work / P to
(p + 1) * work / P. Whoever comes last to a tile adds its parts, always in the same order, so that the same numbers have the
same sum in every run, and keeps its own in registers meanwhile. (`split_sum` gives each part of a tile a program.)
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def first_unit(program, work):
    """Where a program's units begin, and those of the one before end."""
    return program * work // gl.num_programs(0)


@gluon.jit
def program_of(unit, work):
    """Who has this unit: the last one that begins at or before it."""
    return ((unit + 1) * gl.num_programs(0) - 1) // work


@gluon.jit
def part_of(program, first, which, work, SIZE: gl.constexpr):
    """Where a program leaves its part of the tile whose first unit is given; `which` half of it, of SIZE numbers.

    It has two parts at most: of the tile that it begins in, and of the one that it ends in.
    """
    return (4 * program + 2 * (first_unit(program, work) < first).to(gl.int32) + which) * SIZE


@gluon.jit
def add_parts(acc, part_ptr, done_ptr, first, end, which, work, TWO: gl.constexpr):
    """This program's part of the sum of units `first` to `end`, `acc`, one half of a tile: what is the sum of all, and
    whether it is known here. If not, somebody else comes later.

    Who comes last may have to wait until the others' parts are stored. They are at it, and wait for nobody. TWO: no tile has
    more than two parts. Then there need be no registers for a second sum, for a + b is b + a.
    """
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    ACC: gl.constexpr = acc.type.layout
    SIZE: gl.constexpr = ROWS * COLUMNS
    row, column = gl.arange(0, ROWS, gl.SliceLayout(1, ACC)), gl.arange(0, COLUMNS, gl.SliceLayout(0, ACC))
    part_ptr += row[:, None] * COLUMNS + column[None, :]
    mine, begins, ends = gl.program_id(0), program_of(first, work), program_of(end - 1, work)
    is_last = gl.atomic_add(done_ptr, 1, sem="relaxed") == ends - begins
    if is_last:
        while gl.atomic_add(done_ptr + 1, 0, sem="acquire") < ends - begins:
            pass
        gl.store(done_ptr, 0)
        gl.store(done_ptr + 1, 0)
        if TWO:
            acc += gl.load(part_ptr + part_of(begins + ends - mine, first, which, work, SIZE))
        else:
            total = gl.zeros([ROWS, COLUMNS], gl.float32, ACC)
            for program in range(begins, ends + 1):
                if program == mine:
                    total += acc
                else:
                    total += gl.load(part_ptr + part_of(program, first, which, work, SIZE))
            acc = total
    else:
        gl.store(part_ptr + part_of(mine, first, which, work, SIZE), acc)
        tl.debug_barrier()  # all threads have stored before one of them says so
        gl.atomic_add(done_ptr + 1, 1, sem="release")
    return acc, is_last
