"""From what was asked to the smallest automaton."""

from collections.abc import Iterable

import numpy as np

from quire.errors import RequestError
from quire.structured_outputs.fsm.determinize import Determinized
from quire.structured_outputs.fsm.dfa import DEAD, Dfa
from quire.structured_outputs.fsm.limits import MAX_ENTRIES, too_complex
from quire.structured_outputs.fsm.minimize import minimize
from quire.structured_outputs.fsm.nfa import Nfa
from quire.structured_outputs.fsm.nodes import Node
from quire.structured_outputs.fsm.regex import parse
from quire.structured_outputs.fsm.words import word_graph


def of_regex(pattern: str) -> Dfa:
    """The automaton of a pattern. Raises RequestError."""
    return of_node(parse(pattern), "regex")


def of_node(node: Node, param: str) -> Dfa:
    """The automaton of a tree. Raises RequestError about the field `param` where it is too large, or has no text."""
    states = states_of(node, param)
    found = minimize(states.rows, states.accepts, states.classes)
    assert found is not None, "a text matches"
    return found


def states_of(node: Node, param: str) -> Determinized:
    """The automaton before it is made small, which refuses all that `of_node` does."""
    states = Determinized(Nfa(node, param), param)
    if not any(states.accepts):
        raise RequestError(f"no text matches the {param}", param)
    return states


def of_words(words: Iterable[str]) -> Dfa:
    """The automaton of finitely many texts, one of them not empty. Raises RequestError where it is too large."""
    graph = word_graph(word.encode() for word in words)
    used = sorted({byte for _, edges in graph for byte, _ in edges})
    num_classes = len(used) + 1  # the last is of bytes that do not occur
    if len(graph) * num_classes > MAX_ENTRIES:
        raise too_complex("transitions", MAX_ENTRIES, "choice")
    classes = np.full(256, len(used), np.uint8)
    classes[used] = np.arange(len(used), dtype=np.uint8)
    last = len(graph) - 1  # the last node is the first state
    arcs = np.array([(last - node, byte, last - to) for node, (_, edges) in enumerate(graph) for byte, to in edges])
    table = np.full((len(graph) + 1, num_classes), DEAD, np.int32)
    table[arcs[:, 0], classes[arcs[:, 1]]] = arcs[:, 2]
    return Dfa(table, classes, np.array([is_end for is_end, _ in reversed(graph)], bool))
