"""Calls that wait for an answer of the engine.

If the engine dies before it answers, the call is sent to the next engine. A call that adds requests may be the cause.
Such calls are suspects: they are sent to the next engine one at a time, before any other request, until the cause is
found.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from quire.core.request import Request
from quire.errors import EngineStopped

MAX_CRASHES = 3  # crashes with only this call pending and no committed step, after which the call fails


class PendingCall:
    """A pending call."""

    def __init__(
        self, command: Callable[[int], Any], requests: Sequence[Request], *, resend: bool, resumes: str = ""
    ) -> None:
        self.command = command  # call number -> message
        self.requests = requests  # requests that the call adds
        self.resend = resend  # whether it is sent again to the next engine
        self.began = time.monotonic()
        self.resumes = resumes  # id of the open request that it adds again
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.number = -1  # in the PendingCalls that have it
        self.sent = False  # to the current engine
        self.was_pending_at_crash = False  # whether it was sent and pending when an engine died
        self.num_crashes = 0  # deaths of engines that had no other work
        self.was_moved = False  # whether another replica had it when it died


class PendingCalls:
    """The pending calls of one replica by number."""

    def __init__(self) -> None:
        self._pending: dict[int, PendingCall] = {}
        self._count = 0
        self._had_crash = False  # False: no call is a suspect

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def has_suspects(self) -> bool:
        """Whether an unanswered call that adds requests was pending at a crash."""
        if self._had_crash:
            calls = self._pending.values()
            self._had_crash = any(call.was_pending_at_crash and not call.answer.done() for call in calls)
        return self._had_crash

    @property
    def adding(self) -> list[PendingCall]:
        """The unanswered calls that add requests."""
        return [call for call in self._pending.values() if call.requests and not call.answer.done()]

    def add(
        self, command: Callable[[int], Any], requests: Sequence[Request] = (), *, resend: bool = True, resumes: str = ""
    ) -> PendingCall:
        """Add a call. resend: whether it is sent again after a restart. resumes: as in PendingCall."""
        call = PendingCall(command, requests, resend=resend, resumes=resumes)
        self.adopt(call)
        return call

    def give(self, call: PendingCall, other: "PendingCalls") -> None:
        """Have the calls of another replica take an unsent call. There it is no suspect."""
        call.was_moved = call.was_moved or call.was_pending_at_crash
        call.was_pending_at_crash = False
        self.remove(call)
        other.adopt(call)

    def adopt(self, call: PendingCall) -> None:
        """Add a call that another replica has had, or a new one."""
        call.number = self._count
        self._pending[call.number] = call
        self._count += 1

    def pop(self, number: int) -> PendingCall | None:
        """Remove and return a call; None if it is not pending."""
        return self._pending.pop(number, None)

    def remove(self, call: PendingCall) -> bool:
        """Remove a call. Returns whether it was pending here."""
        return self._pending.get(call.number) is call and self.pop(call.number) is not None

    def to_send(self, *, allow_adds: bool) -> Iterator[tuple[int, PendingCall]]:
        """Unsent calls that may be sent now. The caller must set `sent` before it takes the next one.

        allow_adds: whether calls that add requests may be sent.
        """
        adders, one_by_one = self.adding, self.has_suspects
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
        """Mark all calls as unsent after the end of an engine. Those that are not sent again fail."""
        ended = [call for call in self._pending.values() if not call.resend]
        self._pending = {number: call for number, call in self._pending.items() if call.resend}
        for call in self._pending.values():
            call.sent = False
        for call in ended:
            if not call.answer.done():
                call.answer.set_exception(EngineStopped("the engine ended before it answered"))

    def record_crash(self, *, has_other_work: bool) -> list[PendingCall]:
        """Record the death of an engine. Returns the calls that have reached MAX_CRASHES.

        has_other_work: whether the engine had requests, which may be the cause, too.
        """
        pending = [call for call in self._pending.values() if call.sent and call.requests]
        for call in pending:
            call.was_pending_at_crash = self._had_crash = True
            call.num_crashes += len(pending) == 1 and not has_other_work
        return [call for call in pending if call.num_crashes >= MAX_CRASHES]
