"""Streams of outputs, and which of them are paused because their outputs were not read.

All outputs that wait in streams, and what is kept of answers that are sent whole, count in the record of their tenant
(`TenantMemory`). A request whose stream has to wait is taken from the engine, and given to it again later.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Self

from quire.core.output import Output
from quire.errors import QuireError
from quire.tenant_memory import LARGE, MAX_TENANT_BYTES, HeldBytes, TenantMemory

MAX_STREAM_BYTES = 2**23  # of outputs of one stream that were not taken
_FEW_BYTES = 2**18  # of a stream that need not wait, whatever else the tenant holds
_BATCH_BYTES = 2**14  # taken from a stream at once: their text is several times as large


class Stream:
    """Async iterator over the outputs of a group of requests. Must be closed; this aborts unfinished requests.

    memory: record of the tenant, in which the outputs count until they are taken. answers: None for outputs that are
    sent on as they come; otherwise the whole answers of the tenant, of which this is one until it is released.
    num_bytes: of the outputs that were not taken yet.
    """

    def __init__(
        self,
        memory: TenantMemory,
        abort: Callable[[], None],
        answers: "WholeAnswers | None" = None,
        request_ids: Sequence[str] = (),
    ) -> None:
        self.request_ids = request_ids
        self.num_bytes = 0
        self._memory = memory
        self._held = HeldBytes(memory)
        self._abort = abort
        self._answers = answers
        self._outputs: deque[Output] = deque()
        self._error: QuireError | None = None
        self._ready = asyncio.Event()
        self._may_go_on: asyncio.Event | None = None  # of its requests that wait
        if answers is not None:
            answers.add(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Output]:
        """New outputs, at least one, and not many more than _BATCH_BYTES.

        Raises EngineStopped when the engine has stopped. Never stops iteration.
        """
        if self._outputs:
            await asyncio.sleep(0)  # a stream with many outputs lets others take turns
        else:
            await self._ready.wait()
        if not self._outputs:
            assert self._error is not None
            raise self._error
        outputs, num_bytes = [], 0
        while self._outputs and num_bytes < _BATCH_BYTES:
            outputs.append(self._outputs.popleft())
            num_bytes += outputs[-1].num_bytes
        self.num_bytes -= num_bytes
        self._held.subtract(num_bytes)
        if not self._outputs:
            if self._error is None:
                self._ready.clear()
            if self._answers is None:
                self.go_on()
        return outputs

    def put(self, output: Output) -> None:
        """Add an output. To be called on the event loop."""
        num_bytes = output.num_bytes
        self._outputs.append(output)
        self.num_bytes += num_bytes
        self._held.add(num_bytes)
        self._ready.set()

    def keep(self, num_bytes: int) -> None:
        """Count bytes of outputs that were taken, and that are kept until `release`."""
        self._held.add(num_bytes)

    def fail(self, error: QuireError) -> None:
        """End the stream with an error after the outputs so far. To be called on the event loop."""
        self._error = error
        self._ready.set()

    @property
    def must_wait(self) -> bool:
        """Whether the engine should compute no more for it at present.

        An answer that is sent on as it comes waits for its reader. Of the large whole answers of a tenant that holds
        too much, the first goes on, so that its bytes are released.
        """
        if self._answers is not None:
            is_large = self._held.num_bytes > LARGE
            return is_large and self._memory.num_held > MAX_TENANT_BYTES and not self._answers.is_first(self)
        most = _FEW_BYTES if self._memory.num_held > MAX_TENANT_BYTES else MAX_STREAM_BYTES
        return self.num_bytes > most

    async def wait(self) -> None:
        """Wait until the requests may go on: the outputs were taken, or another whole answer was released."""
        if self.must_wait:
            self._may_go_on = self._may_go_on or asyncio.Event()
            if self._answers is not None:
                self._answers.waiting.add(self)
            await self._may_go_on.wait()

    def go_on(self) -> None:
        """End `wait`."""
        if self._may_go_on is not None:
            self._may_go_on.set()
            self._may_go_on = None
            if self._answers is not None:
                self._answers.waiting.discard(self)

    def close(self) -> None:
        """Abort unfinished requests, and drop the outputs. Can be called again."""
        self._abort()
        self._outputs.clear()
        self._held.subtract(self.num_bytes)
        self.num_bytes = 0
        self.go_on()
        if self._answers is None:
            self._held.release()

    def release(self) -> None:
        """Close it. What was kept no longer counts for the tenant. Can be called again."""
        self.close()
        self._held.release()
        if self._answers is not None:
            self._answers.remove(self)


class WholeAnswers:
    """The streams of one tenant whose answers are kept until they are sent whole.

    waiting: those whose requests wait.
    """

    def __init__(self) -> None:
        self.waiting: set[Stream] = set()
        self._streams: dict[Stream, None] = {}  # oldest first

    def add(self, stream: Stream) -> None:
        """Add the newest one."""
        self._streams[stream] = None

    def is_first(self, stream: Stream) -> bool:
        """Whether it is the oldest one."""
        return next(iter(self._streams), stream) is stream

    def remove(self, stream: Stream) -> None:
        """Remove one. Those that wait go on if they may now. Can be called again."""
        self._streams.pop(stream, None)
        for other in [one for one in self.waiting if not one.must_wait]:
            other.go_on()
