"""Stream: outputs of some requests, for whoever waits for them on the event loop."""

import asyncio
from collections.abc import Callable
from typing import Self

from quire.core.output import Output
from quire.errors import QuireError


class Stream:
    """What the engine says about some requests, step by step. Close it, finished or not."""

    def __init__(self, close: Callable[[], None]) -> None:
        self.close = close
        self._outputs: list[Output] = []
        self._error: QuireError | None = None
        self._ready = asyncio.Event()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Output]:
        """All that is new. Raises EngineStopped when nothing more can come; otherwise it never ends by itself."""
        await self._ready.wait()
        self._ready.clear()
        if self._error is not None and not self._outputs:
            self._ready.set()
            raise self._error
        outputs, self._outputs = self._outputs, []
        if self._error is not None:
            self._ready.set()
        return outputs

    def put(self, output: Output) -> None:
        """Called on the event loop."""
        self._outputs.append(output)
        self._ready.set()

    def fail(self, error: QuireError) -> None:
        """Called on the event loop."""
        self._error = error
        self._ready.set()
