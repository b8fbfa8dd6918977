"""The fsm backend: minimal automata for patterns, choices and the regular part of JSON schema."""

from collections.abc import Sequence
from copy import copy

import numpy as np

from quire.core.constraint import Verdict
from quire.errors import RequestError
from quire.params import StructuredOutputsParams
from quire.structured_outputs.fsm.construct import determinize, node_to_dfa, words_to_dfa
from quire.structured_outputs.fsm.dfa import DEAD, Dfa
from quire.structured_outputs.fsm.json_schema import schema_to_node
from quire.structured_outputs.fsm.nodes import Node
from quire.structured_outputs.fsm.regex import parse
from quire.structured_outputs.fsm.token_masks import TokenFsm, TokenTrie
from quire.structured_outputs.json_schema.reader import read_schema
from quire.structured_outputs.limits import VocabularyCache, checked_regex
from quire.structured_outputs.vocabulary import Vocabulary


class FsmGrammar:
    """See Grammar."""

    def __init__(self, fsm: TokenFsm) -> None:
        self._fsm = fsm

    def new_matcher(self, *, fast_forward: bool) -> "FsmMatcher":
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
        self._pending_forced = self._forced()  # forced tokens that the next verdict reports

    def advance(self, tokens: Sequence[int]) -> Verdict:
        """See Matcher."""
        for token in tokens:
            self._accept_token(token)
        forced, self._pending_forced = self._pending_forced, ()
        for token in forced:
            self._state = self._fsm.next_state(self._state, token)
        if not self._error and self._state == DEAD:
            self._error = "forced text does not fit the grammar"
        if not self._error and not self._has_ended and self._fsm.is_stuck(self._state):
            self._error = "no token of the model continues the text as the grammar requires"
        is_over = not self._error and (self._has_ended or self._fsm.is_terminated(self._state))
        return Verdict(forced=[] if self._error else list(forced), is_over=is_over, error=self._error)

    def fill_bitmask(self, words: np.ndarray) -> None:
        """See Matcher."""
        if self._error:
            words[:] = 0
        else:
            words[:] = self._fsm.end_mask if self._has_ended else self._fsm.mask(self._state)

    def fork(self) -> "FsmMatcher":
        """See Matcher."""
        return copy(self)

    def _forced(self) -> tuple[int, ...]:
        return self._fsm.forced_tokens(self._state) if self._fast_forward else ()

    def _accept_token(self, token: int) -> None:
        fsm = self._fsm
        if self._error:
            return
        if fsm.is_end(token) and fsm.accepts(self._state):
            self._has_ended = True
            return
        state = fsm.next_state(self._state, token)
        if state == DEAD or self._has_ended:
            self._error = f"token {token} does not fit the grammar at its position"
            self._pending_forced = ()
            return
        self._state = state
        follows = bool(self._pending_forced) and self._pending_forced[0] == token
        self._pending_forced = self._pending_forced[1:] if follows else self._forced()


class FsmBackend:
    """See Backend. It compiles the kinds regex, choice and json, and caches a trie per vocabulary."""

    def __init__(self) -> None:
        self._trie = VocabularyCache(TokenTrie)

    def check(self, params: StructuredOutputsParams) -> None:
        """See Backend. Raises RequestError for a constraint that is invalid, not regular or too large."""
        if params.kind == "choice":
            automaton(params)
        else:
            determinize(_tree(params), params.kind)

    def compile(self, params: StructuredOutputsParams, vocabulary: Vocabulary) -> FsmGrammar:
        """See Backend."""
        return FsmGrammar(TokenFsm(automaton(params), self._trie(vocabulary), vocabulary))


def automaton(params: StructuredOutputsParams) -> Dfa:
    """The minimal automaton of a constraint. Raises RequestError."""
    if params.kind == "choice":
        return words_to_dfa(params.choice or ())
    return node_to_dfa(_tree(params), params.kind)


def _tree(params: StructuredOutputsParams) -> Node:
    match params.kind:
        case "regex":
            return parse(checked_regex(params))
        case "json":
            whitespace = "" if params.is_compact else params.whitespace_pattern
            return schema_to_node(read_schema(params.text, "json", params), whitespace)
    raise RequestError(f"the fsm backend does not support {params.kind}: use the llguidance backend", params.kind)
