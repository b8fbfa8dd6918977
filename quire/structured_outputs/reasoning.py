"""Reasoning before a constrained answer: free text up to its end tag, within a budget of tokens.

The output is (reasoning, end tag, white space) and then a text of the inner grammar. If the output may begin with the
begin tag, or without reasoning, both are allowed until one of them is excluded. Tags are compared by the texts of
tokens, so that a tag may be one token or several, special or not.
"""

from collections.abc import Callable, Sequence
from copy import copy
from functools import lru_cache

import numpy as np
from msgspec.structs import replace

from quire.core.constraint import EMPTY_VERDICT, Grammar, Matcher, Verdict
from quire.errors import RequestError
from quire.params import ReasoningParams
from quire.structured_outputs.forced_tokens import encode_within
from quire.structured_outputs.fsm.dfa import DEAD, Dfa
from quire.structured_outputs.fsm.nodes import MAX_MASK_BYTES
from quire.structured_outputs.fsm.token_masks import LruCache, TokenTrie
from quire.structured_outputs.limits import pack_bitmask
from quire.structured_outputs.vocabulary import Vocabulary

MAX_SPACE = 16  # bytes of white space before the begin tag, and behind the end tag
_SPACE = b" \t\n\r"
_MAX_TAGS = 8  # automata in the cache

_ALL = np.uint32(0xFFFFFFFF)


class ReasoningCompiler:
    """Makes the grammars with reasoning of one vocabulary. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        trie = lru_cache(maxsize=1)(lambda: TokenTrie(vocabulary))
        self._automaton = lru_cache(maxsize=_MAX_TAGS)(lambda begin, end: TagAutomaton(begin, end, vocabulary, trie))
        self._tokens = lru_cache(maxsize=_MAX_TAGS)(lambda text: _markup_tokens(text, vocabulary))

    def compile(self, params: ReasoningParams, answer: Grammar | None) -> "ReasoningGrammar":
        """The grammar of reasoning and an answer behind it; None: any answer.

        Raises RequestError if the model has no tokens for the end tag, or for the text before the answer.
        """
        if answer is not None and params.answer_begin:
            answer = _HeadedGrammar(self._tokens(params.answer_begin), answer)
        automaton = self._automaton("" if params.begun else params.begin, params.end)
        if answer is not None:
            automaton.masks(0)  # builds the trie here, not on the thread of the engine
        return ReasoningGrammar(automaton, answer, params.budget, may_end=params.may_end)


class TagAutomaton:
    """The states of an output up to its answer. begin: "" if the output begins inside of the reasoning.

    States below `reasoning` have a part of the begin tag, or none yet. In the states from `reasoning` on, a part of the
    end tag matches. In those from `behind` on, the end tag is complete and white space may follow. Other text behind
    the end tag leads to the state `text_behind`. Text without reasoning leads to DEAD. The start is state 0.
    masks(state): two masks, uint32 (num_words,). The first has the tokens that lead to a state below `text_behind`. It
    has no end tokens. The second has those that do not lead to text behind the end tag in the same token. An answer
    without reasoning may have them in a state below `reasoning`.
    """

    def __init__(self, begin: str, end: str, vocabulary: Vocabulary, trie: Callable[[], TokenTrie]) -> None:
        self._vocabulary = vocabulary
        self._trie = trie
        self._end = end.encode()
        self._end_tokens = _markup_tokens(end, vocabulary)
        self._dfa, self.reasoning, self.behind, self.text_behind = _dfa(begin.encode(), self._end)
        self.num_words = vocabulary.num_words
        self.masks = LruCache(self._masks, max(1, MAX_MASK_BYTES // (8 * vocabulary.num_words)))

    def next_state(self, state: int, token: int) -> int:
        """The state after a token."""
        return self._dfa.walk(state, self._text(token))

    def end_tokens(self, state: int) -> tuple[int, ...]:
        """The tokens that complete the end tag in a state of the reasoning."""
        num_matching = state - self.reasoning
        if num_matching:
            rest = self._end[num_matching:].decode(errors="ignore")
            tokens = encode_within(rest, self._vocabulary, self._vocabulary.special_texts)
            if tokens and rest.encode() == self._end[num_matching:]:
                return tuple(tokens)
        return self._end_tokens

    def is_end(self, token: int) -> bool:
        """Whether the token ends a sequence."""
        return token in self._vocabulary.end_ids

    def has_text(self, token: int) -> bool:
        """Whether the token is text, or a special token with a known text."""
        return bool(self._text(token))

    def _text(self, token: int) -> bytes:
        if token in self._vocabulary.special_ids:
            return self._vocabulary.special_texts.get(token, b"")
        return self._vocabulary.tokens[token] if 0 <= token < self._vocabulary.size else b""

    def _masks(self, state: int) -> tuple[np.ndarray, np.ndarray]:
        targets = self._trie().next_states(self._dfa, state)
        for token in self._vocabulary.special_ids.union(self._vocabulary.end_ids):
            if token < self._vocabulary.size:
                is_text = self.has_text(token) and not self.is_end(token)
                targets[token] = self.next_state(state, token) if is_text else DEAD
        fits = targets != self.text_behind
        return pack_bitmask(fits & (targets != DEAD)), pack_bitmask(fits)


def _markup_tokens(text: str, vocabulary: Vocabulary) -> tuple[int, ...]:
    tokens = encode_within(text, vocabulary, vocabulary.special_texts)
    if not tokens:
        raise RequestError(f"this model's tokenizer cannot write {text!r}, the markup of its reasoning", "reasoning")
    return tuple(tokens)


def _dfa(begin: bytes, end: bytes) -> tuple[Dfa, int, int, int]:
    """The automaton of `TagAutomaton`, with its states `reasoning`, `behind` and `text_behind`."""
    num_before = MAX_SPACE + len(begin) if begin else 0
    reasoning, behind = num_before, num_before + len(end)
    text_behind = behind + MAX_SPACE + 1
    rows = np.full((text_behind + 2, 256), DEAD, np.int32)
    if begin:
        _chain_of_space(rows, 0)
        rows[: MAX_SPACE + 1, begin[0]] = MAX_SPACE + 1
        for state, byte in enumerate(begin[1:], MAX_SPACE + 1):
            rows[state, byte] = state + 1
    # Knuth, Morris and Pratt: the longest beginning of `end` that the text ends with.
    shorter = reasoning  # the state after the text without its first matching byte
    for state, byte in enumerate(end, reasoning):
        rows[state] = reasoning if state == reasoning else rows[shorter]
        if state > reasoning:
            shorter = rows[shorter, byte]
        rows[state, byte] = state + 1
    rows[behind:-1] = text_behind
    _chain_of_space(rows, behind)
    accepts = np.arange(len(rows) - 1) >= behind
    return Dfa(rows, np.arange(256, dtype=np.uint8), accepts), reasoning, behind, text_behind


def _chain_of_space(rows: np.ndarray, first: int) -> None:
    """From state `first` on, MAX_SPACE bytes of white space lead each to the next state."""
    for state in range(first, first + MAX_SPACE):
        rows[state, list(_SPACE)] = state + 1


class _HeadedGrammar:
    """See Grammar. Every output begins with the tokens `head`, and a text of `grammar` follows."""

    def __init__(self, head: tuple[int, ...], grammar: Grammar) -> None:
        self._head = head
        self._grammar = grammar

    def new_matcher(self, *, fast_forward: bool) -> "_HeadedMatcher":
        """See Grammar."""
        matcher = self._grammar.new_matcher(fast_forward=fast_forward)
        return _HeadedMatcher(self._head, matcher, fast_forward=fast_forward)


class _HeadedMatcher:
    """See Matcher. head: what is left of it."""

    def __init__(self, head: tuple[int, ...], matcher: Matcher, *, fast_forward: bool) -> None:
        self._head = head
        self._matcher = matcher
        self._fast_forward = fast_forward
        self._error = ""

    def advance(self, tokens: Sequence[int]) -> Verdict:
        """See Matcher."""
        num_common = min(len(tokens), len(self._head))
        if tuple(tokens[:num_common]) != self._head[:num_common]:
            self._error = "a token is not the next one of the text before the answer"
        if self._error:
            return Verdict(error=self._error)
        left, self._head = self._head[num_common:], ()
        if left and not self._fast_forward:
            self._head = left
            return EMPTY_VERDICT
        verdict = self._matcher.advance(tokens[num_common:])
        return replace(verdict, forced=[*left, *verdict.forced]) if left else verdict

    def fill_bitmask(self, words: np.ndarray) -> None:
        """See Matcher."""
        if self._error:
            words[:] = 0
        elif self._head:
            _allow_only(self._head[0], words)
        else:
            self._matcher.fill_bitmask(words)

    def fork(self) -> "_HeadedMatcher":
        """See Matcher."""
        fork = copy(self)
        fork._matcher = self._matcher.fork()
        return fork


def _allow_only(token: int, words: np.ndarray) -> None:
    words[:] = 0
    words[token // 32] = np.uint32(1) << np.uint32(token % 32)


class ReasoningGrammar:
    """See Grammar. answer: the grammar behind the reasoning, None for any text.

    budget, may_end: see ReasoningParams.
    """

    def __init__(
        self, automaton: TagAutomaton, answer: Grammar | None, budget: int | None, *, may_end: bool = False
    ) -> None:
        self._automaton = automaton
        self._answer = answer
        self._budget = budget
        self._may_end = may_end

    def new_matcher(self, *, fast_forward: bool) -> "ReasoningMatcher":
        """See Grammar."""
        return ReasoningMatcher(
            self._automaton, self._answer, self._budget, fast_forward=fast_forward, may_end=self._may_end
        )


class ReasoningMatcher:
    """See Matcher. Verdicts depend on the tokens so far, not on how they are divided into calls.

    A token that completes the end tag may have white space behind it, but nothing of the answer. White space behind the
    end tag belongs to the answer as soon as the answer may begin with it.
    """

    def __init__(
        self,
        automaton: TagAutomaton,
        grammar: Grammar | None,
        budget: int | None,
        *,
        fast_forward: bool,
        may_end: bool,
    ) -> None:
        self._automaton = automaton
        self._grammar = grammar
        self._budget = budget
        self._fast_forward = fast_forward
        self._may_end = may_end
        self._state = 0  # of the automaton; DEAD in the answer
        self._num_tokens = 0  # of reasoning
        self._forced: tuple[int, ...] = ()  # tokens of the end tag that have to follow
        self._error = ""
        self._before: tuple[int, ...] = ()  # tokens that may be of the begin tag, or of an answer without reasoning
        # The matcher of the answer. Before the reasoning it is ahead by `_before`, and None if no answer begins so.
        # Behind the end tag it has consumed nothing. Inside of the reasoning it is None.
        self._answer: Matcher | None = None
        if grammar is not None and automaton.reasoning:
            self._answer = grammar.new_matcher(fast_forward=False)
            self._answer.advance([])
        self._force_end()

    def advance(self, tokens: Sequence[int]) -> Verdict:
        """See Matcher."""
        rest: Sequence[int] = []
        for place, token in enumerate(tokens):
            if self._error:
                break
            if self._state == DEAD or not self._accept(token):
                rest = [*self._before, *tokens[place:]]
                self._before = ()
                break
        if self._error:
            return Verdict(error=self._error)
        if self._state == DEAD:
            return EMPTY_VERDICT if self._answer is None else self._answer.advance(rest)
        forced: tuple[int, ...] = ()
        if self._fast_forward and self._forced:
            forced, self._forced = self._forced, ()
            self._move(forced[-1], self._automaton.behind)
        return Verdict(list(forced))

    def fill_bitmask(self, words: np.ndarray) -> None:
        """See Matcher."""
        if self._error:
            words[:] = 0
        elif self._forced:
            _allow_only(self._forced[0], words)
        elif self._grammar is None:
            words[:] = _ALL
        else:
            words[:] = 0
            if self._answer is not None:
                self._answer.fill_bitmask(words)
            if self._state != DEAD:
                before, without = self._automaton.masks(self._state)
                if self._state < self._automaton.reasoning:
                    words &= without
                words |= without if self._may_end and self._is_reasoning else before

    def fork(self) -> "ReasoningMatcher":
        """See Matcher."""
        fork = copy(self)
        fork._answer = None if self._answer is None else self._answer.fork()
        return fork

    def _accept(self, token: int) -> bool:
        """Consume a token up to the white space behind the end tag. False: the answer begins with it, or before it."""
        automaton = self._automaton
        if self._forced:
            return self._accept_forced(token)
        target = automaton.next_state(self._state, token)
        is_text = automaton.has_text(token) and not automaton.is_end(token)
        if self._grammar is not None and not is_text and not (self._may_end and self._is_reasoning):
            target = DEAD
        if self._state < automaton.reasoning:
            return self._accept_before(token, target)
        if self._state < automaton.behind:
            return self._accept_reasoning(token, target)
        if target in (DEAD, automaton.text_behind) or self._answer_allows(token):
            self._state = DEAD
            return False
        self._state = target
        return True

    def _accept_before(self, token: int, target: int) -> bool:
        """Consume a token before the reasoning. False: the output has no reasoning."""
        if target == DEAD:
            self._state = DEAD
            self._answer = self._new_answer()
            return False
        if target >= self._automaton.reasoning:
            self._before, self._answer = (), None
        elif self._grammar is not None:
            self._before += (token,)
            if self._answer is not None and self._answer.advance([token]).error:
                self._answer = None
        self._move(token, target)
        return True

    def _accept_reasoning(self, token: int, target: int) -> bool:
        """Consume a token of the reasoning."""
        self._num_tokens += 1
        self._move(token, target)
        return True

    def _accept_forced(self, token: int) -> bool:
        """Consume a token in place of the first forced one."""
        if token != self._forced[0]:
            self._error = f"token {token} is not the next one of the end of the reasoning"
        self._forced = self._forced[1:]
        if not self._forced:
            self._move(token, self._automaton.behind)
        return True

    def _move(self, token: int, target: int) -> None:
        """Go with a token to a state before, of or behind the reasoning."""
        self._state = target
        if DEAD < target < self._automaton.behind:
            self._force_end()
            return
        if self._grammar is None:
            self._state = DEAD  # any answer may follow
        elif target in (DEAD, self._automaton.text_behind):
            self._error = f"token {token} ends the output within its reasoning, or has text behind the reasoning's end"
        self._answer = self._new_answer()

    def _force_end(self) -> None:
        """Force the end tag if the reasoning has used its budget."""
        if self._is_reasoning and self._budget is not None and self._num_tokens >= self._budget:
            self._forced = self._automaton.end_tokens(self._state)

    @property
    def _is_reasoning(self) -> bool:
        return self._automaton.reasoning <= self._state < self._automaton.behind

    def _new_answer(self) -> Matcher | None:
        return None if self._grammar is None else self._grammar.new_matcher(fast_forward=self._fast_forward)

    def _answer_allows(self, token: int) -> bool:
        assert self._answer is not None, "behind the reasoning there is an answer"
        words = np.zeros(self._automaton.num_words, np.uint32)
        self._answer.fill_bitmask(words)
        return bool(words[token // 32] >> np.uint32(token % 32) & np.uint32(1))
