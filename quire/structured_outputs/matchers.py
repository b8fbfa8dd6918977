"""The matchers of all constrained sequences."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from quire.core.constraint import Grammar, Matcher, Verdict
from quire.core.request import Request

log = logging.getLogger(__name__)


class _Waiting(NamedTuple):
    """A sequence that has not sampled yet. known: its output tokens so far."""

    grammar: Grammar
    fast_forward: bool
    known: tuple[int, ...]

    def start(self) -> Matcher:
        """A matcher at the start of the grammar."""
        return self.grammar.start(fast_forward=self.fast_forward)


class Matchers:
    """See Constraints. A sequence gets its Matcher when it first samples, because matchers take memory.

    fast_forward: whether verdicts have forced tokens, unless a request disables them. Requests with allowed or bad
    tokens, logit biases or ranked sequences have none.
    """

    def __init__(self, num_words: int, *, fast_forward: bool = True) -> None:
        self._num_words = num_words
        self._fast_forward = fast_forward
        self._grammars: dict[str, Grammar] = {}  # of requests whose sequences have not all begun
        self._waiting: dict[int, _Waiting] = {}
        self._matchers: dict[int, Matcher] = {}
        self._begun: tuple[_Waiting, Verdict] | None = None  # the latest sequence that began

    def expect(self, request_id: str, grammar: Grammar) -> None:
        """Set the grammar for sequences of this request that will begin."""
        self._grammars[request_id] = grammar

    def forget(self, request_id: str) -> None:
        """Release the grammar of a request of which no more sequences begin."""
        self._grammars.pop(request_id, None)

    def begin(self, seq_id: int, request: Request, known: Sequence[int]) -> Verdict:
        """See Constraints."""
        params = request.params
        assert params.structured_outputs is not None, "it is constrained"
        minds_tokens = params.allowed_token_ids is not None or params.bad_words or params.logit_bias or params.is_ranked
        wanted = self._fast_forward and params.structured_outputs.fast_forward and not minds_tokens
        waiting = self._waiting[seq_id] = _Waiting(self._grammars[request.id], wanted, tuple(known))
        if self._begun is None or self._begun[0] != waiting:  # equal for consecutive sequences of a request
            self._begun = waiting, _advanced(waiting.start(), known)
        return self._begun[1]

    def advance(self, seq_id: int, tokens: Sequence[int]) -> Verdict:
        """See Constraints."""
        return _advanced(self._matcher(seq_id), tokens)

    def end(self, seq_id: int) -> None:
        """See Constraints."""
        self._waiting.pop(seq_id, None)
        self._matchers.pop(seq_id, None)

    def masks(self, seq_ids: Sequence[int]) -> np.ndarray:
        """See Constraints."""
        words = np.zeros((len(seq_ids), self._num_words), np.uint32)
        for seq_id, row in zip(seq_ids, words, strict=True):
            _fill(self._matcher(seq_id), row)
        return words

    def _matcher(self, seq_id: int) -> Matcher:
        matcher = self._matchers.get(seq_id)
        if matcher is None:
            waiting = self._waiting.pop(seq_id)
            matcher = self._matchers[seq_id] = waiting.start()
            _advanced(matcher, waiting.known)
        return matcher


def _advanced(matcher: Matcher, tokens: Sequence[int]) -> Verdict:
    """The verdict of a matcher. An exception becomes an error of this sequence alone."""
    try:
        return matcher.advance(tokens)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # panics of a Rust backend are no Exception
        log.exception("a constraint failed")
        return Verdict(error=f"the backend failed ({type(error).__name__})")


def _fill(matcher: Matcher, words: np.ndarray) -> None:
    """Write the mask of a matcher into `words`; all zeros if the matcher raises."""
    try:
        matcher.fill(words)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:
        log.exception("a constraint failed")
        words[:] = 0
