"""Tarpit: delays error responses to tenants that keep sending invalid constraints.

A schema is rejected faster than it is sent. A client that sends nothing else would keep the server busy with reading.
Delaying the response costs no work and slows down a client that waits for it.
"""

from asyncio import sleep
from collections.abc import Callable
from time import monotonic_ns

from starlette.requests import Request

from quire.server.middleware.quota import Bucket
from quire.server.request_params import CONSTRAINT_FIELDS

FREE_BYTES_PER_MINUTE = 2**20  # bytes of rejected bodies per tenant and minute without a delay
UNKNOWN_LENGTH_BYTES = 2**24  # bytes, for a body without content-length: the maximum of request_body.py
BYTES_PER_REJECTION = 2**14  # bytes added to each body
MAX_SECONDS = 10.0
MAX_WAITING = 512  # delayed responses; beyond it, as each takes memory, they are sent at once
MAX_HELD_BYTES = 2**25  # bytes of their bodies, which stay in memory during the delay


class Tarpit:
    """The tarpit of one app. clock: the time in ns."""

    def __init__(self, clock: Callable[[], int] = monotonic_ns) -> None:
        self._clock = clock
        self._buckets: dict[str, Bucket] = {}  # by tenant
        self._num_waiting = self._num_held_bytes = 0

    async def delay(self, request: Request, param: str | None) -> None:
        """Delay the response to an error if `param` is one of CONSTRAINT_FIELDS.

        Admins are exempt, as is every caller of a server without keys, which only this machine can reach.
        """
        if param is None or CONSTRAINT_FIELDS.isdisjoint(param.split(".")):
            return
        caller = request.state.caller
        if caller is None or caller.is_admin:
            return
        length = request.headers.get("content-length", "")
        num_bytes = int(length) if length.isdecimal() else UNKNOWN_LENGTH_BYTES
        seconds = self.delay_seconds(caller.tenant, num_bytes)
        if not seconds or self._num_waiting >= MAX_WAITING or self._num_held_bytes + num_bytes > MAX_HELD_BYTES:
            return
        self._num_waiting += 1
        self._num_held_bytes += num_bytes
        try:
            await sleep(seconds)
        finally:
            self._num_waiting -= 1
            self._num_held_bytes -= num_bytes

    def delay_seconds(self, tenant: str, num_bytes: int) -> float:
        """Count a rejected body of a tenant. Returns the delay of its response, at most MAX_SECONDS."""
        bucket, now = self._buckets.setdefault(tenant, Bucket(FREE_BYTES_PER_MINUTE)), self._clock()
        amount = min(num_bytes + BYTES_PER_REJECTION, FREE_BYTES_PER_MINUTE)
        wait = bucket.wait(amount, now)
        bucket.consume(amount, now)
        return min(wait / 10**9, MAX_SECONDS)
