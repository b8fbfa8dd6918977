"""Calls that wait for an answer of the engine.

If the engine dies before it answers, the call is sent to the next engine. A call that adds requests may be the cause.
Such calls are suspects: they are sent to the next engine one at a time, before any other request, until the cause is
found.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from quire.core.request import Request

MAX_CRASHES = 3  # crashes with only this call pending and no committed step, after which the call fails


class PendingCall:
    """A pending call."""

    def __init__(self, command: Callable[[int], Any], requests: Sequence[Request], *, resend: bool) -> None:
        self.command = command  # call number -> message
        self.requests = requests  # requests that the call adds
        self.resend = resend  # whether it is sent again to the next engine
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.sent = False  # to the current engine
        self.was_pending_at_crash = False  # whether it was sent and pending when an engine died
        self.num_crashes = 0  # deaths of engines that had no other work


class PendingCalls:
    """Pending calls by number."""

    def __init__(self) -> None:
        self._pending: dict[int, PendingCall] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def has_suspects(self) -> bool:
        """Whether an unanswered call that adds requests was pending at a crash."""
        return any(call.was_pending_at_crash and not call.answer.done() for call in self._pending.values())

    def add(
        self, command: Callable[[int], Any], requests: Sequence[Request] = (), *, resend: bool = True
    ) -> tuple[int, PendingCall]:
        """Add a call. Returns its number and the call. resend: whether it is sent again after a restart."""
        number, call = self._count, PendingCall(command, requests, resend=resend)
        self._count += 1
        self._pending[number] = call
        return number, call

    def pop(self, number: int) -> PendingCall | None:
        """Remove and return a call; None if it is not pending."""
        return self._pending.pop(number, None)

    def to_send(self, *, allow_adds: bool) -> Iterator[tuple[int, PendingCall]]:
        """Unsent calls that may be sent now. The caller must set `sent` before it takes the next one.

        allow_adds: whether calls that add requests may be sent.
        """
        adders = [call for call in self._pending.values() if call.requests and not call.answer.done()]
        one_by_one = self.has_suspects
        for number, call in list(self._pending.items()):
            if call.sent or call.answer.done():
                continue
            is_held = one_by_one and (not call.was_pending_at_crash or any(one.sent for one in adders))
            if call.requests and (not allow_adds or is_held):
                continue
            yield number, call

    def fail(self, error: Exception) -> None:
        """Set an error on all calls, because no engine will answer."""
        for call in self._pending.values():
            if not call.answer.done():
                call.answer.set_exception(error)

    def mark_unsent(self) -> None:
        """Mark all calls as unsent after a restart, and remove those that do not last."""
        self._pending = {number: call for number, call in self._pending.items() if call.resend}
        for call in self._pending.values():
            call.sent = False

    def record_crash(self, *, has_other_work: bool) -> list[PendingCall]:
        """Record the death of an engine. Returns the calls that have reached MAX_CRASHES.

        has_other_work: whether the engine had requests, which may be the cause, too.
        """
        pending = [call for call in self._pending.values() if call.sent and call.requests]
        for call in pending:
            call.was_pending_at_crash = True
            call.num_crashes += len(pending) == 1 and not has_other_work
        return [call for call in pending if call.num_crashes >= MAX_CRASHES]
