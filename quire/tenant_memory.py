"""The bytes that the front end holds for each tenant, whatever they are for, in one record per tenant.

What a small request can make large is held here: bodies, objects that are loaded from the store, answers and events
that their client has not read, rows of logprobs. What has not begun waits for its turn (`HeldBytes.hold`). What grows
while it is generated is counted as it grows (`HeldBytes.add`).
"""

import asyncio
from collections import deque
from types import TracebackType
from typing import Self

MAX_TENANT_BYTES = 2**25


class TenantMemory:
    """The bytes that are held for one tenant. Holders that do not fit wait for their turn.

    num_held: bytes now, which `add` can raise above MAX_TENANT_BYTES.
    """

    def __init__(self) -> None:
        self.num_held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, num_bytes: int) -> None:
        """Wait until the bytes fit, after all that waited before."""
        if not self._waiting and self._fits(num_bytes):
            self.num_held += num_bytes
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            self.release(0 if turn.cancelled() else num_bytes)
            raise

    def add(self, num_bytes: int) -> None:
        """Count bytes at once, whether they fit or not."""
        self.num_held += num_bytes

    def release(self, num_bytes: int) -> None:
        """Give bytes back, and admit the next holders."""
        self.num_held -= num_bytes
        while self._waiting and (self._waiting[0][1].cancelled() or self._fits(self._waiting[0][0])):
            size, turn = self._waiting.popleft()
            if not turn.cancelled():
                self.num_held += size
                turn.set_result(None)

    def _fits(self, num_bytes: int) -> bool:
        return self.num_held + num_bytes <= MAX_TENANT_BYTES


class TenantMemories:
    """The record of each tenant of one app."""

    def __init__(self) -> None:
        self._of: dict[str, TenantMemory] = {}

    def of(self, tenant: str) -> TenantMemory:
        """The record of a tenant."""
        return self._of.setdefault(tenant, TenantMemory())


class HeldBytes:
    """The bytes of one holder that count for its tenant, as a context manager that releases them."""

    def __init__(self, memory: TenantMemory) -> None:
        self._memory = memory
        self._num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    async def hold(self, num_bytes: int, seconds: float) -> None:
        """Wait for the holder's turn, and then count the bytes. Raises TimeoutError after `seconds`."""
        async with asyncio.timeout(seconds):
            await self._memory.acquire(num_bytes)
        self._num_bytes += num_bytes

    def add(self, num_bytes: int) -> None:
        """Count bytes at once, whether they fit or not."""
        self._memory.add(num_bytes)
        self._num_bytes += num_bytes

    def subtract(self, num_bytes: int) -> None:
        """Release a part of the bytes."""
        self._memory.release(num_bytes)
        self._num_bytes -= num_bytes

    def release(self) -> None:
        """The bytes no longer count for the tenant. Can be called again."""
        if self._num_bytes:
            self._memory.release(self._num_bytes)
            self._num_bytes = 0
