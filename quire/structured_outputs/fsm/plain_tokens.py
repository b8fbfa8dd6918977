"""A short cut for states that most text leads back to, such as the inside of a string: most tokens need no walk."""

import numpy as np

from quire.structured_outputs.fsm.dfa import DEAD, Dfa
from quire.structured_outputs.fsm.utf8 import byte_ranges

_NOT_ASCII = [span for low, high in ((0x80, 0xD7FF), (0xE000, 0x10FFFF)) for span in byte_ranges(low, high)]
_MANY = 64  # of 128 characters lead elsewhere: a state without much text
_WORTH = 4  # one token in so many may need a walk


class PlainTokens:
    """Which ASCII bytes each of the texts has, and whether it is whole characters."""

    def __init__(self, texts: list[bytes], data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        self._data, self._starts, self._lengths = data, starts, lengths
        bit = np.uint64(1) << (data & 63).astype(np.uint64)
        halves = [np.where(data >> 6 == half, bit, np.uint64(0)) for half in (0, 1)]
        self._ascii = [np.bitwise_or.reduceat(half, starts) if len(starts) else half for half in halves]
        self._is_ascii = np.array([text.isascii() for text in texts], bool)
        self._is_text = self._is_ascii | np.array([_is_text(text) for text in texts], bool)

    def ends(self, dfa: Dfa, state: int) -> np.ndarray | None:
        """int32 (num_texts,): where each text leads from this state. None where too many of them need a walk."""
        leaves = (dfa.table[state, dfa.classes[:128]] != state).astype(np.uint8)
        if leaves.sum() > _MANY:
            return None
        leaving = np.packbits(leaves, bitorder="little").view("<u8").astype(np.uint64)
        stays = ((self._ascii[0] & leaving[0]) | (self._ascii[1] & leaving[1])) == 0
        stays &= self._is_text if _returns(dfa, state) else self._is_ascii
        rest = np.flatnonzero(~stays)
        if len(rest) * _WORTH > len(stays):
            return None
        found = np.where(stays, np.int32(state), np.int32(DEAD))
        self._walk(dfa, state, rest, found)
        return found

    def _walk(self, dfa: Dfa, state: int, left: np.ndarray, found: np.ndarray) -> None:
        """Sets where each of the texts in `left` leads."""
        table, num_columns = dfa.table.reshape(-1), dfa.table.shape[1]
        states = np.full(len(left), state)
        depth = 0
        while len(left):
            states = table[states * num_columns + dfa.classes[self._data[self._starts[left] + depth]]]
            depth += 1
            is_done = self._lengths[left] == depth
            found[left[is_done]] = states[is_done]
            goes_on = ~is_done & (states != DEAD)
            left, states = left[goes_on], states[goes_on]


def _returns(dfa: Dfa, state: int) -> bool:
    """Whether every character beyond ASCII leads from the state back to it."""
    for spans in _NOT_ASCII:
        states = {state}
        for first, last in spans:
            columns = sorted(set(dfa.classes[first : last + 1].tolist()))
            states = {target for one in states for target in dfa.table[one, columns].tolist()}
        if states != {state}:
            return False
    return True


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
