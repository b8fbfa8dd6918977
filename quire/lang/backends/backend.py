"""Base class of backends: what the interpreter needs to generate text."""

import atexit
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

from quire.core.scheduling_params import Program
from quire.errors import RequestError
from quire.lang.batch import AUTO_THREADS
from quire.lang.event_loop import LoopThread
from quire.lang.params import GenParams
from quire.lang.select import ChoicesDecision, ChoicesSamplingMethod
from quire.lang.state_text import Prompt


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of text of one of n sequences, with the meta info of the sequence so far, as SGLang's meta_info.

    meta may have `token_offsets`: for each output token so far, the number of characters before it.
    """

    text: str
    meta: dict[str, Any]
    index: int = 0


class RoleTexts(NamedTuple):
    """The texts that the chat template puts before and after the text of a turn."""

    prefix: str
    suffix: str


@dataclass
class Stats:
    """Calls and tokens of a backend since its construction."""

    num_calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    completion_tokens: int = 0

    def reset(self) -> None:
        """Set all totals to 0, such as SGLang's `token_usage.reset()`."""
        self.num_calls = self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0

    def count(self, prompt: int, completion: int, cached: int = 0) -> None:
        """Add tokens to the totals."""
        self.prompt_tokens += prompt
        self.completion_tokens += completion
        self.cached_tokens += cached


class Backend(ABC):  # optional methods have empty bodies
    """Generates text. Coroutines run on the backend's event loop. Other methods may be called from any other thread.

    is_chat_model: whether it continues conversations, not text. hints: whether calls carry program hints
    (docs/programs.md).
    """

    is_chat_model: bool = False

    def __init__(self, *, hints: bool = True) -> None:
        self.stats = Stats()
        self.hints = hints
        self.loop = LoopThread()
        self.program_pool = ThreadPoolExecutor(AUTO_THREADS, thread_name_prefix="quire-program")  # of `arun`
        atexit.register(self.close)

    def close(self) -> None:
        """Cancel running calls and release all resources. Further calls have no effect."""
        atexit.unregister(self.close)
        self.program_pool.shutdown(wait=False)
        self.loop.close(self.aclose)

    shutdown = close

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def flush_cache(self) -> None:
        """Evict cached KV that no running request uses. Raises RequestError if the backend has no cache."""
        self.loop.run(self.flush_cache_async())

    def cache_prefix(self, prefix: str) -> None:
        """Compute the KV of a text, so that it is in the prefix cache."""
        self.loop.run(self.prefetch(prefix, None))

    @abstractmethod
    def generate(
        self, prompt: Prompt, params: GenParams, program: Program | None, *, stream: bool
    ) -> AsyncGenerator[Piece]:
        """The text that follows a prompt, in pieces. stream: as soon as there is new text; else in few pieces.

        The last meta of each sequence has a finish_reason.
        """

    @abstractmethod
    async def select(
        self,
        prompt: Prompt,
        choices: tuple[str, ...],
        method: ChoicesSamplingMethod,
        program: Program | None,
        *,
        adapter: str | None = None,
    ) -> ChoicesDecision:
        """The choice that `method` ranks first after a prompt. adapter: the name of a LoRA adapter."""

    @abstractmethod
    async def role_texts(self, roles: tuple[str, ...]) -> RoleTexts:
        """The texts around the last of these turns. Raises RequestError."""

    async def prefetch(self, text: str, program: Program | None) -> None:  # noqa: B027
        """Compute the KV of a text. Does nothing in backends without a prefix cache."""

    async def end_program(self, program: str, branch: str | None) -> None:  # noqa: B027
        """End a branch of a program (None: all branches) whose last request had expects_more."""

    async def flush_cache_async(self) -> None:
        """Coroutine of flush_cache."""
        raise RequestError(f"{type(self).__name__} has no cache to flush")

    async def aclose(self) -> None:  # noqa: B027
        """Release all resources: the last coroutine on the loop."""
