"""The bytes that the front end holds for each tenant, whatever they are for, in one record per tenant.

What a small request can make large is held here: bodies, objects that are loaded from the store, answers and events
that their client has not read, rows of logprobs. What has not begun waits for its turn (`HeldBytes.hold`). What grows
while it is generated is counted as it grows (`HeldBytes.add`).

Holders that hold bytes and wait for more cannot deadlock, although all may do so at once. One of them, `_beyond`, is
admitted whether its bytes fit or not. It waits for no other, and when it releases, the next one takes its place. So a
tenant holds at most MAX_TENANT_BYTES, what one such holder needs more, and what grows.
"""

import asyncio
from collections import defaultdict, deque
from types import TracebackType
from typing import NamedTuple, Self

MAX_TENANT_BYTES = 2**25
LARGE = 2**16  # bytes from which a body, an object or an answer counts for its tenant: smaller ones wait for nothing


class _Waiting(NamedTuple):
    """holder: of the bytes, if it holds some already; else None."""

    num_bytes: int
    holder: object | None
    turn: asyncio.Future[None]


class TenantMemory:
    """The bytes that are held for one tenant. Holders that do not fit wait for their turn.

    num_held: bytes now, which `add` can raise above MAX_TENANT_BYTES.
    """

    def __init__(self) -> None:
        self.num_held = 0
        self._beyond: object | None = None  # the holder that got more bytes although they did not fit
        self._waiting: deque[_Waiting] = deque()  # those that hold nothing,
        self._waiting_for_more: deque[_Waiting] = deque()  # and those that hold bytes, which come first

    @property
    def num_waiting(self) -> int:
        """Number of holders that wait for their turn."""
        return sum(not one.turn.cancelled() for one in (*self._waiting_for_more, *self._waiting))

    async def acquire(self, num_bytes: int, holder: object | None = None) -> None:
        """Wait until the bytes fit, after all that waited before. holder: if it holds bytes already.

        More than MAX_TENANT_BYTES fit when nothing else is held.
        """
        if holder is not None and self._beyond is holder:  # which waits for no other, or others could wait for it
            self.num_held += num_bytes
            return
        queue = self._waiting if holder is None else self._waiting_for_more
        one = _Waiting(num_bytes, holder, asyncio.get_running_loop().create_future())
        queue.append(one)
        self._admit_waiting()
        try:
            await one.turn
        except asyncio.CancelledError:
            if one.turn.cancelled():
                self._admit_waiting()
            else:
                self.release(num_bytes)
            raise

    def add(self, num_bytes: int) -> None:
        """Count bytes at once, whether they fit or not."""
        self.num_held += num_bytes

    def release(self, num_bytes: int, holder: object | None = None) -> None:
        """Give bytes back, and admit the next holders. holder: if it holds nothing from now on."""
        self.num_held -= num_bytes
        if holder is not None and self._beyond is holder:
            self._beyond = None
        if self._waiting_for_more or self._waiting:
            self._admit_waiting()

    def _admit_waiting(self) -> None:
        for queue in (self._waiting_for_more, self._waiting):
            while queue and (queue[0].turn.cancelled() or self._admits(queue[0])):
                one = queue.popleft()
                if not one.turn.cancelled():
                    self.num_held += one.num_bytes
                    one.turn.set_result(None)
            if queue:
                return

    def _admits(self, one: _Waiting) -> bool:
        if self.num_held == 0 or self.num_held + one.num_bytes <= MAX_TENANT_BYTES:
            return True
        if one.holder is None or self._beyond is not None:
            return False
        self._beyond = one.holder
        return True


class TenantMemories:
    """The record of each tenant of one app."""

    def __init__(self) -> None:
        self._of: defaultdict[str, TenantMemory] = defaultdict(TenantMemory)

    def of(self, tenant: str) -> TenantMemory:
        """The record of a tenant."""
        return self._of[tenant]


class HeldBytes:
    """The bytes of one holder that count for its tenant, as a context manager that releases them.

    num_bytes: that it holds now.
    """

    def __init__(self, memory: TenantMemory) -> None:
        self.memory = memory
        self.num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    async def hold(self, num_bytes: int, seconds: float) -> None:
        """Wait for the holder's turn, and then count the bytes. Raises TimeoutError after `seconds`."""
        async with asyncio.timeout(seconds):
            await self.memory.acquire(num_bytes, self if self.num_bytes else None)
        self.num_bytes += num_bytes

    def add(self, num_bytes: int) -> None:
        """Count bytes at once, whether they fit or not."""
        self.memory.add(num_bytes)
        self.num_bytes += num_bytes

    def subtract(self, num_bytes: int) -> None:
        """Release a part of the bytes."""
        self.memory.release(num_bytes)
        self.num_bytes -= num_bytes

    def release(self) -> None:
        """The bytes no longer count for the tenant. Can be called again."""
        if self.num_bytes:
            num_bytes, self.num_bytes = self.num_bytes, 0
            self.memory.release(num_bytes, self)
