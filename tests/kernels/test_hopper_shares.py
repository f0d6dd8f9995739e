"""Which program of hopper_kernel takes which steps of which tile, by the kernel's own arithmetic in Python.

A step that two programs take or none does, or a part that nobody waits for, shows on a GPU only.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest

from lowbit_kernels import hopper
from lowbit_kernels.hopper import share_out

pytestmark = pytest.mark.skipif(not hopper.HAS_GLUON, reason="this Triton has no Gluon for Hopper")

BLOCK_M, BLOCK_N = 128, 64

CASES = [
    # tokens, rows, steps, split_k, at_once
    (64, 64, 1, 1, 0),
    (300, 1000, 32, 1, 0),
    (300, 1000, 32, 3, 0),
    (70, 300, 3, 8, 0),
    # whole rounds and the rest in slices; nothing left over; everything at once
    (2000, 1000, 32, 3, 132),
    (2048, 1024, 32, 4, 64),
    (2000, 1000, 64, 2, 500),
    # the rest evenly: tiles of two parts, of many, parts of three tiles, fewer steps than programs
    (1000, 1000, 32, 1, 132),
    (300, 1000, 32, 1, 132),
    (2000, 1000, 33, 1, 132),
    (128, 1280, 32, 1, 8),
    (300, 300, 2, 1, 132),
]


@pytest.fixture
def python(monkeypatch):
    """The kernel's device functions as functions of Python's integers."""
    here = SimpleNamespace(program=0)
    plain = SimpleNamespace(
        minimum=min, maximum=max, cdiv=lambda a, b: -(-a // b), program_id=lambda axis: here.program
    )
    monkeypatch.setattr(hopper, "gl", plain)
    functions = {name: getattr(hopper, name).fn for name in ("_units_of", "_next", "_segment", "_part")}
    monkeypatch.setattr(hopper, "_units_of", functions["_units_of"])
    vars(here).update(functions)
    return here


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_step_of_every_tile_is_taken_once(case, python):
    m, n, steps, split_k, at_once = case
    places = {(t, r) for t in range(0, m, BLOCK_M) for r in range(0, n, BLOCK_N)}
    shares = share_out(len(places), steps, split_k, at_once)
    division = shares.whole, shares.share, shares.pitch
    # a program for each tile: units are not asked for
    one = not at_once and shares.most_parts == 1
    taken = defaultdict(list)
    for program in range(shares.programs):
        python.program = program
        unit, end = python._units_of(program, program, m, n, *division, BLOCK_M, BLOCK_N)
        assert unit < end
        while unit < end:
            token, row, first, count = python._segment(
                unit, end, m, n, steps, shares.pitch, BLOCK_M, BLOCK_N, one
            )
            place, part, parts = python._part(unit, steps, *division)
            part = (place, part, parts) if place >= 0 else (place, 0, 1)
            taken[token, row].append((*part, first, count, program))
            unit, end = python._next(unit, end, program, shares.programs, m, n, *division, BLOCK_M, BLOCK_N)
    assert set(taken) == places
    rest = []
    for parts in taken.values():
        parts.sort(key=lambda part: part[1])
        # the first part waits for the others, whose programs were launched before
        assert all(program < parts[0][-1] for *_, program in parts[1:])
        assert [step for *_, first, count, _ in parts for step in range(first, first + count)] == list(
            range(steps)
        )
        assert [part for _, part, *_ in parts] == list(range(len(parts)))
        assert {(place, of) for place, _, of, *_ in parts} == {(parts[0][0], len(parts))}
        assert len(parts) <= shares.most_parts
        rest += [parts[0][0]] * (len(parts) > 1)
    # those that are shared have a place of their own in the workspace
    assert len(set(rest)) == len(rest)
    assert all(0 <= place < len(places) - shares.whole for place in rest)


def test_the_longest_program_is_what_was_asked_for():
    # 160 tiles of 64 steps: 132 whole, then 28 in four slices each; or shared by 132 programs
    assert share_out(160, 64, 4, 132) == hopper.Shares(132, 132, 16, 64, 4)
    assert share_out(160, 64, 1, 132) == hopper.Shares(132, 132, 14, 64, 6)
    # 96 tiles of 32 steps by 132 programs: 24 steps, of at most two tiles
    assert share_out(96, 32, 1, 132) == hopper.Shares(128, 0, 24, 32, 2)
    # two full rounds; no more than a program for each tile; an eighth of three steps is one step
    assert share_out(264, 32, 1, 132) == hopper.Shares(132, 264, 32, 32, 1)
    assert share_out(264, 32, 1, 0) == hopper.Shares(264, 264, 32, 32, 1)
    assert share_out(5, 3, 8, 0) == hopper.Shares(15, 0, 1, 3, 3)
