"""Grammars: constraints are compiled on threads of their own, kept by content, and given up after a while.

A thread cannot be ended: what takes too long goes on until the backend's own limits stop it, and nobody waits for it.
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

STACK_BYTES = 16 * 2**20  # twice what the bounds of constraints were tried with

_SETTING = threading.Lock()


@contextmanager
def deep_stacks() -> Iterator[None]:
    """Threads that are started meanwhile have such a stack, whatever the system's limit is."""
    with _SETTING:
        before = threading.stack_size(STACK_BYTES)
        try:
            yield
        finally:
            threading.stack_size(before)


NUM_THREADS = 2
DEADLINE = 5.0  # seconds
MAX_KEPT = 256  # compiled constraints, and errors
MAX_CHARACTERS = 2**20  # of their texts: what is made of one takes up to a hundred times as many bytes

log = logging.getLogger(__name__)


class _Work:
    """A constraint that is compiled, or was. began: when a thread took it up, of the clock; None before."""

    def __init__(self) -> None:
        self.grammar: Future[Grammar]
        self.began: float | None = None
        self.num_waiting = 0  # requests


class _Job(NamedTuple):
    """What a request waits for, and since when."""

    asked: StructuredOutputsParams
    work: _Work
    since: float


class Compiler(Protocol):
    """What an engine needs of it."""

    constraints: Constraints

    def submit(self, request_id: str, asked: StructuredOutputsParams) -> None:
        """Compile the constraint of a request."""

    def finished(self) -> list[tuple[str, str]]:
        """Requests whose constraint is there, or cannot be: the error says why. Each is told once."""

    def forget(self, request_id: str) -> None:
        """The sequences of a request have begun, or it is given up; an unknown one is ignored."""

    def wait(self, seconds: float) -> None:
        """Until something is finished, or so long."""

    def close(self) -> None:
        """The end: nothing may be called after it."""


class Grammars:
    """A Compiler. Its methods belong to one thread."""

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
        """vocabulary: asked for once, with the first constraint."""
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
        key = replace(asked, fast_forward=True)  # which is no part of a grammar
        work = self._kept.get(key)
        if work is None:
            work = self._kept[key] = _Work()
            self._num_kept_characters += len(key.text)
            with deep_stacks():  # the pool may start a thread for it
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
        """A request waits no longer. What nobody waits for is not begun."""
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
        """What went wrong; nothing where its sequences may begin."""
        error = compiled.exception()
        if error is None:
            self._matchers.expect(request_id, compiled.result())
            return ""
        if not isinstance(error, RequestError):
            log.error("a form could not be compiled", exc_info=error)
            return f"this form could not be compiled ({type(error).__name__}); change it"
        return str(error)


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int, end_ids: tuple[int, ...]) -> Vocabulary:
    """What backends have to know of a tokenizer. vocab_size: logits of the model."""
    known = tokenizer.eos_token_id
    ends = tuple(token for token in end_ids or (known,) if token is not None and 0 <= token < vocab_size)
    special_ids = tokenizer.special_ids | frozenset(ends)
    return Vocabulary(
        tokens=[b"" if token in special_ids else tokenizer.token_bytes(token) for token in range(vocab_size)],
        end_ids=ends,
        special_ids=special_ids,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )
