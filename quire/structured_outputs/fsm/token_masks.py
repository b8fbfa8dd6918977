"""An automaton over the tokens of one vocabulary: which may come in a state, where they lead, which have to come."""

import numpy as np

from quire.structured_outputs.forced_tokens import forced_tokens
from quire.structured_outputs.fsm.compress import compress
from quire.structured_outputs.fsm.dfa import DEAD, Dfa
from quire.structured_outputs.fsm.limits import MAX_MASK_BYTES
from quire.structured_outputs.fsm.recent import Recent
from quire.structured_outputs.fsm.token_trie import TokenTrie
from quire.structured_outputs.limits import MAX_FORCED, packed
from quire.structured_outputs.vocabulary import Vocabulary

_MAX_SPAN = 4096  # bytes that are tokenised at once
_MAX_SPANS = 1024  # that are remembered
_MAX_WALKS = 20_000_000  # states times nodes of the trie, up to which dead ends are looked for


class TokenFsm:
    """What a state allows, as tokens. All answers depend on the state alone, and are remembered within bounds."""

    def __init__(self, dfa: Dfa, trie: TokenTrie, vocabulary: Vocabulary) -> None:
        self._dfa = dfa
        self._trie = trie
        self._vocabulary = vocabulary
        self._compressed = compress(dfa)
        self._ends = frozenset(token for token in vocabulary.end_ids if token < vocabulary.size)
        self._can_write_all = _used_bytes(dfa) <= trie.single
        self._live = None if self._can_write_all else _live(dfa, trie)
        self.end_mask = packed(self._with_ends(np.zeros(vocabulary.size, bool)))
        self.mask = Recent(self._mask, max(1, MAX_MASK_BYTES // (4 * vocabulary.num_words)))
        self.forced = Recent(self._forced, _MAX_SPANS)

    def is_end(self, token: int) -> bool:
        """Whether the token ends a sequence."""
        return token in self._ends

    def accepts(self, state: int) -> bool:
        """Whether the text may end in this state."""
        return bool(self._dfa.accepts[state])

    def is_last(self, state: int) -> bool:
        """Whether nothing but the end may come."""
        return self.accepts(state) and bool((self._dfa.table[state] == DEAD).all())

    def is_stuck(self, state: int) -> bool:
        """Whether no token may come, and not the end: only where the vocabulary cannot write some byte."""
        return not self._can_write_all and not self.mask(state).any()

    def after(self, state: int, token: int) -> int:
        """The state behind the token, or DEAD."""
        if not 0 <= token < self._vocabulary.size or token in self._vocabulary.special_ids:
            return DEAD
        text = self._vocabulary.tokens[token]
        return self._dfa.walk(state, text) if text else DEAD

    def _mask(self, state: int) -> np.ndarray:
        """uint32 (num_words,): the tokens that may come, ends among them where the text may end."""
        ends = self._trie.ends(self._dfa, state)
        allowed = ends != DEAD if self._live is None else self._live[ends]
        return packed(self._with_ends(allowed) if self.accepts(state) else allowed)

    def _with_ends(self, allowed: np.ndarray) -> np.ndarray:
        allowed[list(self._ends)] = True
        return allowed

    def _forced(self, state: int) -> tuple[int, ...]:
        """The tokens that have to come, MAX_FORCED of them at most."""
        data, behind = self._compressed.span(state)
        if not data:
            return ()
        closed = len(data) <= _MAX_SPAN and self.is_last(behind)
        return tuple(forced_tokens(data[:_MAX_SPAN], self._vocabulary, closed=closed)[:MAX_FORCED])


def _used_bytes(dfa: Dfa) -> set[int]:
    """Bytes that some text of the language has."""
    used = (dfa.table != DEAD).any(axis=0)[dfa.classes]
    return set(np.flatnonzero(used).tolist())


def _live(dfa: Dfa, trie: TokenTrie) -> np.ndarray | None:
    """bool (num_states + 1,): whether tokens lead from a state to an end; the last, of DEAD, is False.

    None where that takes too long to find out: then a text may come to where no token goes on.
    """
    if dfa.num_states * trie.num_nodes > _MAX_WALKS:
        return None
    before: list[set[int]] = [set() for _ in range(dfa.num_states)]
    for state in range(dfa.num_states):
        for target in set(trie.ends(dfa, state).tolist()) - {DEAD}:
            before[target].add(state)
    live = np.append(dfa.accepts, False)
    for state in (queue := np.flatnonzero(live).tolist()):
        for other in sorted(before[state]):
            if not live[other]:
                live[other] = True
                queue.append(other)
    return live
