"""Search for patterns in text that arrives in pieces, in linear time.

The states of a deterministic automaton are built when the text first reaches them (Thompson, 1968; as in RE2). A text
of n bytes takes at most n steps over the states of the nondeterministic automaton, whatever the pattern.
"""

from collections.abc import Iterable, Sequence

from quire.errors import RequestError
from quire.structured_outputs.fsm.nfa import ACCEPT, Nfa
from quire.structured_outputs.fsm.nodes import ALL, SEARCHED_FIELD, Chars
from quire.structured_outputs.fsm.regex import parse_end

MAX_STATES = 1024  # of the nondeterministic automata of the patterns of one request, together
_MAX_CACHED = 16_384  # entries of the deterministic automata of one request: states of a state, and transitions

State = frozenset[int]  # states of an Nfa that have an arc, and ACCEPT


class PatternSearch:
    """A compiled pattern, which any number of texts may share. Not thread-safe.

    A state describes the text so far. `start` is the state of the empty text. max_states: of the nondeterministic
    automaton. max_cached: entries of the deterministic one, which is built anew beyond them. Raises RequestError for a
    pattern that is invalid, not regular or too complex, and for one that matches the empty text.
    """

    def __init__(self, pattern: str, *, max_states: int = MAX_STATES, max_cached: int = _MAX_CACHED) -> None:
        self.pattern = pattern
        self._nfa = Nfa(parse_end(pattern, SEARCHED_FIELD, Chars(ALL)), SEARCHED_FIELD, max_states=max_states)
        self._max_cached = max_cached
        self._num_cached = 0
        self._next: dict[State, dict[int, State]] = {}  # by state and byte
        self.start = self._closure([self._nfa.start])
        if ACCEPT in self.start:
            raise RequestError(f"the {SEARCHED_FIELD} {pattern!r:.100} matches the empty text", SEARCHED_FIELD)

    @property
    def num_states(self) -> int:
        """States of the nondeterministic automaton."""
        return len(self._nfa.arcs) + len(self._nfa.splits)

    def find_end(self, state: State, text: str) -> tuple[State, int | None]:
        """The state after more text, and the number of its characters up to the first end of a match.

        None if no match ends in this text. The state is that of the characters up to the match.
        """
        for place, char in enumerate(text, 1):
            for byte in char.encode(errors="surrogatepass"):
                found = self._next.get(state, {}).get(byte)
                state = self._step(state, byte) if found is None else found
            if ACCEPT in state:
                return state, place
        return state, None

    def _step(self, state: State, byte: int) -> State:
        """The state after a byte, which is remembered."""
        if self._num_cached > self._max_cached:
            self._next.clear()
            self._num_cached = 0
        arcs = (self._nfa.arcs[one] for one in state if one != ACCEPT)
        target = self._closure([target for first, last, target in arcs if first <= byte <= last])
        self._next.setdefault(state, {})[byte] = target
        self._num_cached += 1 + len(target)
        return target

    def _closure(self, states: Iterable[int]) -> State:
        """The states with an arc, and ACCEPT, that can be reached from these states without a byte."""
        seen = set(states)
        for one in (queue := list(seen)):
            for other in self._nfa.splits.get(one, ()):
                if other not in seen:
                    seen.add(other)
                    queue.append(other)
        return frozenset(one for one in queue if one == ACCEPT or one in self._nfa.arcs)


def compile_searches(patterns: Sequence[str]) -> tuple[PatternSearch, ...]:
    """The patterns of one request. Raises RequestError for one that PatternSearch refuses, and for too many states."""
    searches: list[PatternSearch] = []
    num_left = MAX_STATES
    for pattern in patterns:
        searches.append(PatternSearch(pattern, max_states=num_left, max_cached=_MAX_CACHED // len(patterns)))
        num_left -= searches[-1].num_states
    return tuple(searches)
