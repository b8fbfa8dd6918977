"""The matchers of all constrained sequences."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from quire.core.constraint import Grammar, Matcher, Verdict
from quire.core.request import Request

log = logging.getLogger(__name__)


class _PendingMatcher(NamedTuple):
    """A sequence that has not sampled yet. output_token_ids: its output tokens so far."""

    grammar: Grammar
    fast_forward: bool
    output_token_ids: tuple[int, ...]

    def start(self) -> Matcher:
        """A matcher at the start of the grammar."""
        return self.grammar.new_matcher(fast_forward=self.fast_forward)


class Matchers:
    """See Constraints. A sequence gets its Matcher when it first samples, because matchers take memory.

    fast_forward: whether verdicts have forced tokens, unless a request disables them. Requests with allowed or bad
    tokens, logit biases or ranked sequences have none.
    """

    def __init__(self, num_words: int, *, fast_forward: bool = True) -> None:
        self._num_words = num_words
        self._fast_forward = fast_forward
        self._grammars: dict[str, Grammar] = {}  # of requests whose sequences have not all begun
        self._pending: dict[int, _PendingMatcher] = {}
        self._matchers: dict[int, Matcher] = {}
        self._last_verdict: tuple[_PendingMatcher, Verdict] | None = None  # the latest sequence that began

    def add_grammar(self, request_id: str, grammar: Grammar) -> None:
        """Set the grammar for sequences of this request that will begin."""
        self._grammars[request_id] = grammar

    def remove_grammar(self, request_id: str) -> None:
        """Release the grammar of a request of which no more sequences begin."""
        self._grammars.pop(request_id, None)

    def begin(self, seq_id: int, request: Request, output_tokens: Sequence[int]) -> Verdict:
        """See Constraints."""
        params = request.params
        assert params.structured_outputs is not None, "the request has no constraint"
        minds_tokens = params.allowed_token_ids is not None or params.bad_words or params.logit_bias or params.is_ranked
        wanted = self._fast_forward and params.structured_outputs.fast_forward and not minds_tokens
        waiting = self._pending[seq_id] = _PendingMatcher(self._grammars[request.id], wanted, tuple(output_tokens))
        if (
            self._last_verdict is None or self._last_verdict[0] != waiting
        ):  # equal for consecutive sequences of a request
            self._last_verdict = waiting, _advance_or_error(waiting.start(), output_tokens)
        return self._last_verdict[1]

    def advance(self, seq_id: int, tokens: Sequence[int]) -> Verdict:
        """See Constraints."""
        return _advance_or_error(self._matcher(seq_id), tokens)

    def end(self, seq_id: int) -> None:
        """See Constraints."""
        self._pending.pop(seq_id, None)
        self._matchers.pop(seq_id, None)

    def masks(self, seq_ids: Sequence[int]) -> np.ndarray:
        """See Constraints."""
        words = np.zeros((len(seq_ids), self._num_words), np.uint32)
        for seq_id, row in zip(seq_ids, words, strict=True):
            _fill_or_zero(self._matcher(seq_id), row)
        return words

    def _matcher(self, seq_id: int) -> Matcher:
        matcher = self._matchers.get(seq_id)
        if matcher is None:
            waiting = self._pending.pop(seq_id)
            matcher = self._matchers[seq_id] = waiting.start()
            _advance_or_error(matcher, waiting.output_token_ids)
        return matcher


def _advance_or_error(matcher: Matcher, tokens: Sequence[int]) -> Verdict:
    """The verdict of a matcher. An exception becomes an error of this sequence alone."""
    try:
        return matcher.advance(tokens)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # panics of a Rust backend are no Exception
        log.exception("the grammar backend failed")
        return Verdict(error=f"the backend failed ({type(error).__name__})")


def _fill_or_zero(matcher: Matcher, words: np.ndarray) -> None:
    """Write the mask of a matcher into `words`; all zeros if the matcher raises."""
    try:
        matcher.fill_bitmask(words)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        log.exception("the grammar backend failed")
        words[:] = 0
