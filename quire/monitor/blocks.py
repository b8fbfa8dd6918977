"""States of blocks as codes, and codes as text.

A state is a letter and, for blocks that sequences own, an owner number. Sequences of states are run-length coded:
"F*120,U:3*4,C*7" is 120 free blocks, 4 of owner 3, and 7 cached ones.
"""

from collections.abc import Iterable, Sequence

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


def encode_runs(codes: np.ndarray) -> str:
    """Codes as text, run-length coded. There must be at least one."""
    starts = np.flatnonzero(np.diff(codes, prepend=codes[:1] ^ -1))
    lengths = np.diff(starts, append=len(codes))
    runs = zip(codes[starts].tolist(), lengths.tolist(), strict=True)
    return ",".join(f"{_state(code)}*{length}" for code, length in runs)


def changed_runs(before: np.ndarray | None, codes: np.ndarray) -> list[tuple[int, str]]:
    """(first block, text) of the changed runs of codes; of all codes without a `before`."""
    if before is None:
        return [(0, encode_runs(codes))] if len(codes) else []
    changed = np.flatnonzero(codes != before)
    if not len(changed):
        return []
    breaks = np.flatnonzero(np.diff(changed) > _NEAR) + 1
    firsts = changed[np.concatenate(([0], breaks))].tolist()
    lasts = changed[np.concatenate((breaks - 1, [len(changed) - 1]))].tolist()
    return [(first, encode_runs(codes[first : last + 1])) for first, last in zip(firsts, lasts, strict=True)]


def _state(code: int) -> str:
    letter = LETTERS[code >> _SHIFT]
    return f"{letter}:{code & ((1 << _SHIFT) - 1)}" if letter in _OWNED else letter
