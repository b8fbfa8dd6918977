"""SlowRefusals: who sends many forms that cannot be had gets the answers slowly. Knows bytes and time, no forms.

A schema is refused faster than it is sent, so a client that sends nothing else would keep the server busy with reading.
Its answers are held back instead: that takes no work, and such a client waits for them.
"""

from asyncio import sleep
from collections.abc import Callable
from time import monotonic_ns
from traceback import clear_frames

from starlette.requests import Request

from quire.server.api.request_params import FORM_FIELDS
from quire.server.middleware.quota import Bucket

FREE = 2**20  # bytes a minute of bodies that were refused, of one tenant; what goes beyond waits
UNKNOWN = 2**24  # bytes of a body whose length was not told: as many as it may have
EACH = 2**14  # bytes that each refusal counts beside its body
MAX_SECONDS = 10.0
MAX_WAITING = 512  # answers; more are given at once, as each takes memory
MAX_HELD = 2**25  # bytes of their bodies, which are not freed before


class SlowRefusals:
    """One app's. clock: the time in ns."""

    def __init__(self, clock: Callable[[], int] = monotonic_ns) -> None:
        self._clock = clock
        self._buckets: dict[str, Bucket] = {}  # by tenant
        self._num_waiting = self._num_held = 0

    async def wait(self, request: Request, error: Exception, param: str | None) -> None:
        """Until an answer may leave that refuses the field `param`. Operators with a key do not wait."""
        if param is None or FORM_FIELDS.isdisjoint(param.split(".")):
            return
        caller = request.state.caller
        if caller is None or (caller.is_admin and caller.tenant):
            return
        length = request.headers.get("content-length", "")
        num_bytes = int(length) if length.isdecimal() else UNKNOWN
        seconds = self.seconds(caller.tenant, num_bytes)
        if not seconds or self._num_waiting >= MAX_WAITING or self._num_held + num_bytes > MAX_HELD:
            return
        clear_frames(error.__traceback__)  # which hold what was made of the body
        self._num_waiting += 1
        self._num_held += num_bytes
        try:
            await sleep(seconds)
        finally:
            self._num_waiting -= 1
            self._num_held -= num_bytes

    def seconds(self, tenant: str, num_bytes: int) -> float:
        """How long the answer to one more body of a tenant has to wait."""
        bucket, now = self._buckets.setdefault(tenant, Bucket(FREE)), self._clock()
        amount = min(num_bytes + EACH, FREE)
        wait = bucket.wait(amount, now)
        bucket.take(amount, now)
        return min(wait / 10**9, MAX_SECONDS)
