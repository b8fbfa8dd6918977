"""The fsm backend: minimal automata for patterns, choices and the regular part of JSON schema."""

import json
from collections.abc import Sequence

import numpy as np

from quire.core.constraint import Verdict
from quire.errors import RequestError
from quire.params import StructuredOutputsParams
from quire.structured_outputs.fsm.construct import of_node, of_words, states_of
from quire.structured_outputs.fsm.dfa import DEAD, Dfa
from quire.structured_outputs.fsm.json_schema import of_schema
from quire.structured_outputs.fsm.nodes import Node
from quire.structured_outputs.fsm.regex import parse
from quire.structured_outputs.fsm.token_masks import TokenFsm, TokenTrie
from quire.structured_outputs.limits import ByVocabulary, checked_regex
from quire.structured_outputs.vocabulary import Vocabulary


class FsmGrammar:
    """See Grammar."""

    def __init__(self, fsm: TokenFsm) -> None:
        self._fsm = fsm

    def start(self, *, fast_forward: bool) -> "FsmMatcher":
        """See Grammar."""
        return FsmMatcher(self._fsm, fast_forward=fast_forward)


class FsmMatcher:
    """See Matcher. Verdicts depend on the tokens so far, not on how they are divided into calls.

    A verdict has forced tokens at the state in which they begin. If a sequence is resumed within forced tokens, the
    verdict has the rest of them.
    """

    def __init__(self, fsm: TokenFsm, *, fast_forward: bool) -> None:
        self._fsm = fsm
        self._fast_forward = fast_forward
        self._state = 0
        self._error = ""
        self._has_ended = False
        self._told = self._forced()  # forced tokens that the next verdict reports

    def advance(self, tokens: Sequence[int]) -> Verdict:
        """See Matcher."""
        for token in tokens:
            self._take(token)
        told, self._told = self._told, ()
        for token in told:
            self._state = self._fsm.after(self._state, token)
        if not self._error and self._state == DEAD:
            self._error = "forced text does not fit the grammar"
        if not self._error and not self._has_ended and self._fsm.is_stuck(self._state):
            self._error = "no token of the model can write what the grammar needs next"
        is_over = not self._error and (self._has_ended or self._fsm.is_last(self._state))
        return Verdict(forced=[] if self._error else list(told), is_over=is_over, error=self._error)

    def fill(self, words: np.ndarray) -> None:
        """See Matcher."""
        if self._error:
            words[:] = 0
        else:
            words[:] = self._fsm.end_mask if self._has_ended else self._fsm.mask(self._state)

    def _forced(self) -> tuple[int, ...]:
        return self._fsm.forced(self._state) if self._fast_forward else ()

    def _take(self, token: int) -> None:
        fsm = self._fsm
        if self._error:
            return
        if fsm.is_end(token) and fsm.accepts(self._state):
            self._has_ended = True
            return
        state = fsm.after(self._state, token)
        if state == DEAD or self._has_ended:
            self._error = f"token {token} does not fit the grammar where it came"
            self._told = ()
            return
        self._state = state
        follows = bool(self._told) and self._told[0] == token
        self._told = self._told[1:] if follows else self._forced()


class FsmBackend:
    """See Backend. It compiles the kinds regex, choice and json, and caches a trie per vocabulary."""

    def __init__(self) -> None:
        self._trie = ByVocabulary(TokenTrie)

    def check(self, asked: StructuredOutputsParams) -> None:
        """See Backend. Raises RequestError for a constraint that is invalid, not regular or too large."""
        if asked.kind == "choice":
            automaton(asked)
        else:
            states_of(_tree(asked), asked.kind)

    def compile(self, asked: StructuredOutputsParams, vocabulary: Vocabulary) -> FsmGrammar:
        """See Backend."""
        return FsmGrammar(TokenFsm(automaton(asked), self._trie(vocabulary), vocabulary))


def automaton(asked: StructuredOutputsParams) -> Dfa:
    """The minimal automaton of a constraint. Raises RequestError."""
    if asked.kind == "choice":
        return of_words(asked.choice or ())
    return of_node(_tree(asked), asked.kind)


def _tree(asked: StructuredOutputsParams) -> Node:
    match asked.kind:
        case "regex":
            return parse(checked_regex(asked))
        case "json":
            whitespace = "" if asked.disable_any_whitespace else asked.whitespace_pattern
            return of_schema(json.loads(asked.text), whitespace)
    raise RequestError(f"the fsm backend has no {asked.kind}: use the llguidance backend", asked.kind)
