"""States of blocks as codes, and codes as text.

A state is a letter and, for blocks that sequences own, an owner number. Sequences of states are run-length coded:
"F*120,U:3*4,C*7" is 120 free blocks, 4 of owner 3, and 7 cached ones.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

LETTERS = "FCUSPOH"
_OWNED = "USH"
_SHIFT = 24  # bits of the owner number
FREE, CACHED, USED, SHARED, PINNED, OTHER, HOST = (number << _SHIFT for number in range(len(LETTERS)))
_NEAR = 8  # unchanged blocks between two changed ones that go with them: cheaper than a run of their own


def block_codes(num_blocks: int, marks: Iterable[tuple[Sequence[int] | np.ndarray, int]]) -> np.ndarray:
    """(num_blocks,) int32: codes of blocks. marks: (blocks, code), of which later ones win. All others are free."""
    codes = np.full(num_blocks, FREE, np.int32)
    for blocks, code in marks:
        codes[blocks] = code
    return codes


def set_owners(codes: np.ndarray, owners: Sequence[int], blocks: Sequence[np.ndarray]) -> None:
    """Mark the blocks of sequences as used, or as shared by several, in place. A shared block has the first's number.

    owners: a number per sequence. blocks: (n,) block numbers per sequence.
    """
    if not owners:
        return
    ids = np.concatenate(blocks)
    numbers = np.repeat(np.asarray(owners, np.int32), [len(some) for some in blocks])
    counts = np.bincount(ids, minlength=len(codes))
    first = np.zeros(len(codes), np.int32)
    first[ids[::-1]] = numbers[::-1]  # of repeated indices the last assignment counts: the first sequence
    used = counts > 0
    codes[used] = (np.where(counts > 1, SHARED, USED) | first)[used]


def changed_runs(before: np.ndarray | None, codes: np.ndarray) -> list[tuple[int, str]]:
    """(first block, text) of the changed runs of codes; of all codes without a `before`."""
    if not len(codes):
        return []
    if before is None:
        return _encode_runs(codes, np.zeros(1, np.intp), np.array([len(codes)]))
    changed = np.flatnonzero(codes != before)
    if not len(changed):
        return []
    breaks = np.flatnonzero(np.diff(changed) > _NEAR) + 1
    firsts = changed[np.concatenate(([0], breaks))]
    return _encode_runs(codes, firsts, changed[np.concatenate((breaks - 1, [-1]))] + 1)


def _encode_runs(codes: np.ndarray, firsts: np.ndarray, stops: np.ndarray) -> list[tuple[int, str]]:
    """(first block, text) of some ranges of codes, with as few calls of numpy for many ranges as for one."""
    cuts = np.flatnonzero(codes[1:] != codes[:-1]) + 1  # where the state is another than that of the block before
    begins, ends = np.searchsorted(cuts, firsts, "right").tolist(), np.searchsorted(cuts, stops).tolist()
    at, states = cuts.tolist(), codes[cuts].tolist()
    runs = []
    places = zip(firsts.tolist(), stops.tolist(), codes[firsts].tolist(), begins, ends, strict=True)
    for first, stop, state, begin, end in places:
        points, some = [first, *at[begin:end], stop], [state, *states[begin:end]]
        lengths = [after - place for place, after in pairwise(points)]
        runs.append((first, ",".join(f"{_state(one)}*{length}" for one, length in zip(some, lengths, strict=True))))
    return runs


def _state(code: int) -> str:
    letter = LETTERS[code >> _SHIFT]
    return f"{letter}:{code & ((1 << _SHIFT) - 1)}" if letter in _OWNED else letter
