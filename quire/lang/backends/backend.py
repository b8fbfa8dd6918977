"""Backend: what the interpreter needs of whatever generates. Knows texts and parameters, no model and no protocol."""

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
    """More text of one of n sequences, and all that is known of the sequence by now, as SGLang's meta_info.

    meta may have `token_offsets`: for each token so far the characters before it, where the backend knows.
    """

    text: str
    meta: dict[str, Any]
    index: int = 0


class RoleTexts(NamedTuple):
    """What stands before and behind the text of a turn."""

    prefix: str
    suffix: str


@dataclass
class Stats:
    """What a backend was asked for since it was made."""

    num_calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompts, whose KV was there
    completion_tokens: int = 0

    def count(self, prompt: int, completion: int, cached: int = 0) -> None:
        """One call's tokens."""
        self.prompt_tokens += prompt
        self.completion_tokens += completion
        self.cached_tokens += cached


class Backend(ABC):  # what it may leave out does nothing
    """Generates. Its coroutines run on a loop of its own; what has no `async` may be called from any thread.

    is_chat_model: it continues conversations, not texts. hints: whether it is told of programs (docs/programs.md).
    """

    is_chat_model: bool = False

    def __init__(self, *, hints: bool = True) -> None:
        self.stats = Stats()
        self.hints = hints
        self.loop = LoopThread()
        self.programs = ThreadPoolExecutor(AUTO_THREADS, thread_name_prefix="quire-program")  # of coroutines
        atexit.register(self.close)

    def close(self) -> None:
        """Give up what runs, and let go of what it holds. May be called again."""
        atexit.unregister(self.close)
        self.programs.shutdown(wait=False)
        self.loop.close(self.ended)

    shutdown = close

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def flush_cache(self) -> None:
        """Forget all KV that nobody uses. Raises RequestError where the backend cannot."""
        self.loop.run(self.flushed())

    def cache_prefix(self, prefix: str) -> None:
        """Compute a text's KV, so that prompts which begin with it find it."""
        self.loop.run(self.prefetch(prefix, None))

    @abstractmethod
    def pieces(
        self, prompt: Prompt, params: GenParams, program: Program | None, *, stream: bool
    ) -> AsyncGenerator[Piece]:
        """What comes behind a prompt, piece by piece; or, without `stream`, in whatever pieces cost least.

        The last meta of each sequence has a finish_reason.
        """

    @abstractmethod
    async def select(
        self, prompt: Prompt, choices: tuple[str, ...], method: ChoicesSamplingMethod, program: Program | None
    ) -> ChoicesDecision:
        """The choice that the model finds best behind a prompt."""

    @abstractmethod
    async def role_texts(self, roles: tuple[str, ...]) -> RoleTexts:
        """What stands around the last of these turns. Raises RequestError."""

    async def prefetch(self, text: str, program: Program | None) -> None:  # noqa: B027
        """Compute the KV of a text. Does nothing where that is of no use."""

    async def end_program(self, program: str, branch: str | None) -> None:  # noqa: B027
        """Nothing more comes of a branch of a program, though it was said that something would; None: of all."""

    async def flushed(self) -> None:
        """See flush_cache."""
        raise RequestError(f"{type(self).__name__} has no cache that could be flushed")

    async def ended(self) -> None:  # noqa: B027
        """Let go of everything."""
