"""Asynchronous compilation of constraints, with a cache by content and a deadline.

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

_SETTING = threading.Lock()


@contextmanager
def deep_stacks() -> Iterator[None]:
    """Threads that are started inside have a stack of STACK_BYTES, whatever the system's limit is."""
    with _SETTING:
        before = threading.stack_size(STACK_BYTES)
        try:
            yield
        finally:
            threading.stack_size(before)


NUM_THREADS = 2
DEADLINE = 5.0  # seconds
MAX_KEPT = 256  # cached grammars and errors
MAX_CHARACTERS = 2**20  # of the cached constraints; a grammar takes up to 100 bytes per character

log = logging.getLogger(__name__)


class _Work:
    """The compilation of one constraint. began: time at which a thread started it; None before."""

    def __init__(self) -> None:
        self.grammar: Future[Grammar]
        self.began: float | None = None
        self.num_waiting = 0  # requests that wait for the grammar


class _Job(NamedTuple):
    """A request that waits for a compilation. since: time of its submission."""

    asked: StructuredOutputsParams
    work: _Work
    since: float


class Compiler(Protocol):
    """Compiles the constraints of requests for an engine."""

    constraints: Constraints

    def submit(self, request_id: str, asked: StructuredOutputsParams) -> None:
        """Start to compile the constraint of a request."""

    def finished(self) -> list[tuple[str, str]]:
        """New results as (request id, error); the error is "" if the grammar is ready. Each result is returned once."""

    def forget(self, request_id: str) -> None:
        """Release a request whose sequences have begun, or that was aborted. An unknown id is ignored."""

    def wait(self, seconds: float) -> None:
        """Block until a compilation is finished, for at most `seconds`."""

    def close(self) -> None:
        """Stop the compiler. No method may be called afterwards."""


class Grammars:
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
        self._making = threading.Lock()
        self._backend = backend
        self._deadline = deadline
        self._clock = clock
        self._pool = ThreadPoolExecutor(NUM_THREADS, "quire-grammar")
        self._kept: OrderedDict[StructuredOutputsParams, _Work] = OrderedDict()
        self._num_kept_characters = 0
        self._jobs: dict[str, _Job] = {}

    def submit(self, request_id: str, asked: StructuredOutputsParams) -> None:
        """See Compiler."""
        key = replace(asked, fast_forward=True)  # a grammar does not depend on it
        work = self._kept.get(key)
        if work is None:
            work = self._kept[key] = _Work()
            self._num_kept_characters += len(key.text)
            with deep_stacks():  # submit may start a thread
                work.grammar = self._pool.submit(self._compile, key, work)
        self._kept.move_to_end(key)
        work.num_waiting += 1
        self._jobs[request_id] = _Job(key, work, self._clock())
        while len(self._kept) > MAX_KEPT or (self._num_kept_characters > MAX_CHARACTERS and len(self._kept) > 1):
            self._drop(next(iter(self._kept)))

    def finished(self) -> list[tuple[str, str]]:
        """See Compiler."""
        if not self._jobs:
            return []
        now, told = self._clock(), []
        for request_id, (_, work, since) in list(self._jobs.items()):
            if work.grammar.done():
                told.append((request_id, self._outcome(request_id, work.grammar)))
            elif work.began is not None and now - work.began > self._deadline:
                told.append((request_id, f"it took longer than {self._deadline:g} s to compile this form; simplify it"))
            elif work.began is None and now - since > self._deadline:
                told.append((request_id, "too many forms are being compiled; try again later"))
        for request_id, _ in told:
            self._leave(request_id)
        return told

    def forget(self, request_id: str) -> None:
        """See Compiler."""
        self._leave(request_id)
        self._matchers.forget(request_id)

    def wait(self, seconds: float) -> None:
        """See Compiler."""
        wait([job.work.grammar for job in self._jobs.values()], seconds, FIRST_COMPLETED)

    def close(self) -> None:
        """See Compiler."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _leave(self, request_id: str) -> None:
        """Remove a waiting request. Cancel its compilation if it has not begun and no other request waits for it."""
        job = self._jobs.pop(request_id, None)
        if job is None:
            return
        job.work.num_waiting -= 1
        if not job.work.num_waiting and job.work.grammar.cancel() and self._kept.get(job.asked) is job.work:
            self._drop(job.asked)

    def _drop(self, asked: StructuredOutputsParams) -> None:
        del self._kept[asked]
        self._num_kept_characters -= len(asked.text)

    def _compile(self, asked: StructuredOutputsParams, work: _Work) -> Grammar:
        work.began = self._clock()
        with self._making:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
        return compile_grammar(asked, self._vocabulary, self._backend)

    def _outcome(self, request_id: str, compiled: "Future[Grammar]") -> str:
        """The error of a finished compilation; "" if it succeeded, and then the matchers have the grammar."""
        error = compiled.exception()
        if error is None:
            self._matchers.expect(request_id, compiled.result())
            return ""
        if not isinstance(error, RequestError):
            log.error("a form could not be compiled", exc_info=error)
            return f"this form could not be compiled ({type(error).__name__}); change it"
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
