"""Asynchronous compilation of constraints, with a cache by content and a deadline. `backends` compiles.

A thread cannot be stopped. A compilation that exceeds the deadline continues until the backend's own limits stop it,
but its requests have failed already.
"""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple, Protocol

from quire.core.constraint import Constraints, Grammar
from quire.errors import RequestError
from quire.params import StructuredOutputsParams
from quire.structured_outputs.backends import compile as compile_grammar
from quire.structured_outputs.matchers import Matchers
from quire.structured_outputs.vocabulary import Vocabulary
from quire.tokenizer.tokenizer import Tokenizer

STACK_BYTES = 16 * 2**20  # twice the stack with which the limits of constraints were tested

_STACK_SIZE_LOCK = threading.Lock()


@contextmanager
def large_thread_stacks() -> Iterator[None]:
    """Threads that are started inside have a stack of STACK_BYTES, whatever the system's limit is."""
    with _STACK_SIZE_LOCK:
        before = threading.stack_size(STACK_BYTES)
        try:
            yield
        finally:
            threading.stack_size(before)


NUM_THREADS = 2
DEADLINE = 5.0  # seconds
MAX_CACHED = 256  # cached grammars and errors
MAX_CACHED_CHARACTERS = 2**20  # of the cached constraints; a grammar takes up to 100 bytes per character

log = logging.getLogger(__name__)


class _Compilation:
    """The compilation of one constraint. started_at: time at which a thread started it; None before."""

    def __init__(self) -> None:
        self.grammar: Future[Grammar]
        self.started_at: float | None = None
        self.num_waiting = 0  # requests that wait for the grammar


class _WaitingRequest(NamedTuple):
    """A request that waits for a compilation. submitted_at: seconds on the compiler's clock."""

    params: StructuredOutputsParams
    compilation: _Compilation
    submitted_at: float


class Compiler(Protocol):
    """Compiles the constraints of requests for an engine."""

    constraints: Constraints

    def submit(self, request_id: str, params: StructuredOutputsParams) -> None:
        """Start to compile the constraint of a request."""

    def finished(self) -> list[tuple[str, str]]:
        """New results as (request id, error); the error is "" if the grammar is ready. Each result is returned once."""

    def forget(self, request_id: str) -> None:
        """Release a request whose sequences have begun, or that was aborted. An unknown id is ignored."""

    def wait(self, seconds: float) -> None:
        """Block until a compilation is finished, for at most `seconds`."""

    def close(self) -> None:
        """Stop the compiler. No method may be called afterwards."""


class GrammarCompiler:
    """See Compiler. All methods must be called from one thread."""

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        vocab_size: int,
        *,
        backend: str = "auto",
        fast_forward: bool = True,
        deadline: float = DEADLINE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """vocabulary: called once, for the first constraint. deadline: in seconds of `clock`."""
        self._matchers = Matchers(-(-vocab_size // 32), fast_forward=fast_forward)
        self.constraints: Constraints = self._matchers
        self._make_vocabulary = vocabulary
        self._vocabulary: Vocabulary | None = None
        self._vocabulary_lock = threading.Lock()
        self._backend = backend
        self._deadline = deadline
        self._clock = clock
        self._pool = ThreadPoolExecutor(NUM_THREADS, "quire-grammar")
        self._cache: OrderedDict[StructuredOutputsParams, _Compilation] = OrderedDict()
        self._num_cached_characters = 0
        self._waiting_requests: dict[str, _WaitingRequest] = {}

    def submit(self, request_id: str, params: StructuredOutputsParams) -> None:
        """See Compiler."""
        key = replace(params, fast_forward=True)  # a grammar does not depend on it
        work = self._cache.get(key)
        if work is None:
            work = self._cache[key] = _Compilation()
            self._num_cached_characters += len(key.text)
            with large_thread_stacks():  # submit may start a thread
                work.grammar = self._pool.submit(self._compile, key, work)
        self._cache.move_to_end(key)
        work.num_waiting += 1
        self._waiting_requests[request_id] = _WaitingRequest(key, work, self._clock())
        while len(self._cache) > MAX_CACHED or (
            self._num_cached_characters > MAX_CACHED_CHARACTERS and len(self._cache) > 1
        ):
            self._evict(next(iter(self._cache)))

    def finished(self) -> list[tuple[str, str]]:
        """See Compiler."""
        if not self._waiting_requests:
            return []
        now, outcomes = self._clock(), []
        for request_id, (_, work, since) in list(self._waiting_requests.items()):
            if work.grammar.done():
                outcomes.append((request_id, self._outcome(request_id, work.grammar)))
            elif work.started_at is not None and now - work.started_at > self._deadline:
                outcomes.append(
                    (request_id, f"compiling this constraint took longer than {self._deadline:g} s; simplify it")
                )
            elif work.started_at is None and now - since > self._deadline:
                outcomes.append((request_id, "too many constraints are being compiled; try again later"))
        for request_id, _ in outcomes:
            self._stop_waiting(request_id)
        return outcomes

    def forget(self, request_id: str) -> None:
        """See Compiler."""
        self._stop_waiting(request_id)
        self._matchers.remove_grammar(request_id)

    def wait(self, seconds: float) -> None:
        """See Compiler."""
        wait([job.compilation.grammar for job in self._waiting_requests.values()], seconds, FIRST_COMPLETED)

    def close(self) -> None:
        """See Compiler."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _stop_waiting(self, request_id: str) -> None:
        """Remove a waiting request. Cancel its compilation if it has not begun and no other request waits for it."""
        job = self._waiting_requests.pop(request_id, None)
        if job is None:
            return
        job.compilation.num_waiting -= 1
        if (
            not job.compilation.num_waiting
            and job.compilation.grammar.cancel()
            and self._cache.get(job.params) is job.compilation
        ):
            self._evict(job.params)

    def _evict(self, params: StructuredOutputsParams) -> None:
        del self._cache[params]
        self._num_cached_characters -= len(params.text)

    def _compile(self, params: StructuredOutputsParams, work: _Compilation) -> Grammar:
        work.started_at = self._clock()
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
        return compile_grammar(params, self._vocabulary, self._backend)

    def _outcome(self, request_id: str, compiled: "Future[Grammar]") -> str:
        """The error of a finished compilation; "" if it succeeded, and then the matchers have the grammar."""
        error = compiled.exception()
        if error is None:
            self._matchers.add_grammar(request_id, compiled.result())
            return ""
        if not isinstance(error, RequestError):
            log.error("a constraint could not be compiled", exc_info=error)
            return f"this constraint could not be compiled ({type(error).__name__}); change it"
        return str(error)


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
    )
