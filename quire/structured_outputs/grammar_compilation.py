"""The prerequisite of constrained requests: their constraints become grammars."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, wait
from typing import NamedTuple

from quire.core.constraint import Constraints, Grammar
from quire.core.prerequisite import Prerequisite
from quire.core.request import CONSTRAINT, Request
from quire.params import Constraint
from quire.structured_outputs.backends import compile as compile_grammar
from quire.structured_outputs.grammar_cache import CAPACITY, DEADLINE, Compilation, Fault, GrammarCache
from quire.structured_outputs.matchers import Matchers
from quire.structured_outputs.reasoning import ReasoningCompiler
from quire.structured_outputs.vocabulary import Vocabulary
from quire.tokenizer.tokenizer import Tokenizer


class _WaitingRequest(NamedTuple):
    """A request that waits for a compilation. submitted_at: seconds on the compiler's clock."""

    compilation: Compilation[Constraint, Grammar]
    submitted_at: float


class GrammarCompiler(Prerequisite):
    """Compiles the constraints of requests. All methods must be called from one thread."""

    name = CONSTRAINT

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        vocab_size: int,
        *,
        backend: str = "auto",
        fast_forward: bool = True,
        capacity: int = CAPACITY,
        deadline: float = DEADLINE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """vocabulary: called once, for the first constraint. capacity, deadline: see GrammarCache."""
        self._cache: GrammarCache[Constraint, Grammar] = GrammarCache(
            self._compile, capacity=capacity, deadline=deadline, clock=clock
        )
        self._matchers = Matchers(-(-vocab_size // 32), fast_forward=fast_forward, on_failure=self._cache.drop)
        self.constraints: Constraints = self._matchers
        self._make_vocabulary = vocabulary
        self._vocabulary: tuple[Vocabulary, ReasoningCompiler] | None = None
        self._vocabulary_lock = threading.Lock()
        self._backend = backend
        self._clock = clock
        self._waiting_requests: dict[str, _WaitingRequest] = {}

    def is_needed(self, request: Request) -> bool:
        return request.is_constrained

    def submit(self, request: Request) -> None:
        """Start to compile the constraint of a request, unless its namespace has the grammar already."""
        constraint = request.params.constraint
        assert constraint is not None, "the request is constrained"
        compilation = self._cache.request(request.namespace, constraint)
        self._waiting_requests[request.id] = _WaitingRequest(compilation, self._clock())

    def finished(self) -> list[tuple[str, str]]:
        results = []
        for request_id, waiting in list(self._waiting_requests.items()):
            outcome = self._cache.outcome(*waiting)
            if outcome is None:
                continue
            self._stop_waiting(request_id)
            if isinstance(outcome, Fault):
                results.append((request_id, outcome.message))
            else:
                self._matchers.add_grammar(request_id, outcome)
                results.append((request_id, ""))
        return results

    def forget(self, request_id: str) -> None:
        self._stop_waiting(request_id)
        self._matchers.remove_grammar(request_id)

    def wait(self, seconds: float) -> None:
        wait([waiting.compilation.result for waiting in self._waiting_requests.values()], seconds, FIRST_COMPLETED)

    def close(self) -> None:
        self._cache.close()

    def _stop_waiting(self, request_id: str) -> None:
        waiting = self._waiting_requests.pop(request_id, None)
        if waiting is not None:
            self._cache.release(waiting.compilation)

    def _compile(self, constraint: Constraint) -> Grammar:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                made = self._make_vocabulary()
                self._vocabulary = made, ReasoningCompiler(made)
        vocabulary, reasoning_compiler = self._vocabulary
        asked, reasoning = constraint
        answer = None if asked is None else compile_grammar(asked, vocabulary, self._backend)
        if reasoning is None:
            assert answer is not None, "a constraint has one of both"
            return answer
        return reasoning_compiler.compile(reasoning, answer)


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int, end_ids: tuple[int, ...]) -> Vocabulary:
    """The vocabulary of a tokenizer. vocab_size: logits of the model. end_ids: if empty, the tokenizer's end token."""
    known = tokenizer.eos_token_id
    ends = tuple(token for token in end_ids or (known,) if token is not None and 0 <= token < vocab_size)
    special_ids = tokenizer.special_ids | frozenset(ends)
    return Vocabulary(
        tokens=[b"" if token in special_ids else tokenizer.token_bytes(token) for token in range(vocab_size)],
        end_ids=ends,
        special_ids=special_ids,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        special_texts={token: tokenizer.token_bytes(token) for token in special_ids if token < vocab_size},
    )
