"""The matchers of all constrained sequences."""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import WeakSet

import numpy as np

from quire.core.constraint import NO_DRAFTS, AllowedDrafts, Grammar, Matcher, Verdict, allowed_drafts
from quire.core.request import Request

log = logging.getLogger(__name__)

_ALL = np.uint32(0xFFFFFFFF)


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
    tokens, tokens that may not repeat, logit biases, logits processors or ranked sequences have none. on_failure:
    called once with each grammar of which a matcher raised an exception.
    """

    def __init__(
        self, num_words: int, *, fast_forward: bool = True, on_failure: Callable[[Grammar], None] | None = None
    ) -> None:
        self._num_words = num_words
        self._fast_forward = fast_forward
        self._on_failure = on_failure
        self._failed: WeakSet[Grammar] = WeakSet()
        self._grammars: dict[str, Grammar] = {}  # of requests whose sequences have not all begun
        self._pending: dict[int, _PendingMatcher] = {}
        self._matchers: dict[int, tuple[Grammar, Matcher]] = {}
        self._last_verdict: tuple[_PendingMatcher, Verdict] | None = None  # the latest sequence that began

    def add_grammar(self, request_id: str, grammar: Grammar) -> None:
        """Set the grammar for sequences of this request that will begin."""
        self._grammars[request_id] = grammar

    def remove_grammar(self, request_id: str) -> None:
        """Release the grammar of a request of which no more sequences begin."""
        self._grammars.pop(request_id, None)

    def begin(self, seq_id: int, request: Request, output_tokens: Sequence[int]) -> Verdict:
        """See Constraints."""
        params, constraint = request.params, request.params.constraint
        assert constraint is not None, "the request has no constraint"
        bans_tokens = params.allowed_token_ids is not None or params.bad_words or params.no_repeat_ngram_size
        minds_tokens = bans_tokens or params.logit_bias or params.logits_processors or params.is_ranked
        wanted = self._fast_forward and constraint.fast_forward and not minds_tokens
        grammar = self._grammars[request.id]
        waiting = self._pending[seq_id] = _PendingMatcher(grammar, wanted, tuple(output_tokens))
        if (
            self._last_verdict is None or self._last_verdict[0] != waiting
        ):  # equal for consecutive sequences of a request
            self._last_verdict = waiting, self._advance_or_error(grammar, waiting.start, output_tokens)
        return self._last_verdict[1]

    def advance(self, seq_id: int, tokens: Sequence[int]) -> Verdict:
        """See Constraints."""
        return self._advance_or_error(self._grammar(seq_id), lambda: self._matcher(seq_id), tokens)

    def end(self, seq_id: int) -> None:
        """See Constraints."""
        self._pending.pop(seq_id, None)
        self._matchers.pop(seq_id, None)

    def allowed_drafts(self, seq_id: int, drafts: Sequence[int], most: int) -> AllowedDrafts:
        """See Constraints. A backend that fails allows none; the sequence itself continues."""
        try:
            fork = self._matcher(seq_id).fork()
            return allowed_drafts(lambda token: fork.advance([token]), drafts, most)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            self._record_failure(self._grammar(seq_id), error)
            return NO_DRAFTS

    def masks(self, seq_ids: Sequence[int], drafts: Sequence[AllowedDrafts]) -> np.ndarray:
        """See Constraints."""
        words = np.zeros((len(seq_ids) + sum(len(one.tokens) for one in drafts), self._num_words), np.uint32)
        stop = 0
        for seq_id, one in zip(seq_ids, drafts, strict=True):
            start, stop = stop, stop + len(one.tokens) + 1
            try:
                self._fill_masks(self._matcher(seq_id), one, words[start:stop])
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                self._record_failure(self._grammar(seq_id), error)
                words[start:stop] = 0
        return words

    @staticmethod
    def _fill_masks(matcher: Matcher, drafts: AllowedDrafts, words: np.ndarray) -> None:
        """Write the mask before each draft, and the one behind the last."""
        if drafts.tokens:
            matcher = matcher.fork()
        matcher.fill_bitmask(words[0])
        forced = set(drafts.forced)
        for place, token in enumerate(drafts.tokens, 1):
            if place - 1 not in forced:  # the matcher consumes forced tokens with the token before them
                matcher.advance([token])
            if place in forced:
                words[place] = _ALL
            else:
                matcher.fill_bitmask(words[place])

    def _grammar(self, seq_id: int) -> Grammar:
        return self._pending[seq_id].grammar if seq_id in self._pending else self._matchers[seq_id][0]

    def _matcher(self, seq_id: int) -> Matcher:
        if seq_id in self._pending:
            waiting = self._pending[seq_id]
            matcher = waiting.start()
            matcher.advance(waiting.output_token_ids)
            del self._pending[seq_id]
            self._matchers[seq_id] = waiting.grammar, matcher
        return self._matchers[seq_id][1]

    def _advance_or_error(self, grammar: Grammar, matcher: Callable[[], Matcher], tokens: Sequence[int]) -> Verdict:
        """The verdict of a matcher. An exception becomes an error of this sequence alone."""
        try:
            return matcher().advance(tokens)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # panics of a Rust backend are no Exception
            self._record_failure(grammar, error)
            return Verdict(error=f"the backend failed ({type(error).__name__})")

    def _record_failure(self, grammar: Grammar, error: BaseException) -> None:
        """Log the first failure of a grammar, and report the grammar."""
        if grammar in self._failed:
            return
        self._failed.add(grammar)
        log.error("the grammar backend failed; the grammar is dropped", exc_info=error)
        if self._on_failure is not None:
            self._on_failure(grammar)
