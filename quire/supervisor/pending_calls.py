"""Calls that wait for an answer of the engine.

If the engine dies before it answers, the call is sent to the next engine. If the engine died without committing a
step, a call that adds requests may be the cause: such calls are then sent one at a time, until the cause is found.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from quire.engine.inputs import NewRequest

MAX_CRASHES = 3  # crashes with only this call pending and no committed step, after which the call fails


class PendingCall:
    """A pending call."""

    def __init__(self, command: Callable[[int], Any], requests: Sequence[NewRequest], *, resend: bool) -> None:
        self.command = command  # call number -> message
        self.requests = requests  # requests that the call adds
        self.resend = resend  # whether it is sent again to the next engine
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.sent = False  # to the current engine
        self.was_pending_at_crash = False  # whether it was pending when an engine died without a committed step
        self.num_crashes = 0  # such crashes in which it was the only call that adds requests


class PendingCalls:
    """Pending calls by number."""

    def __init__(self) -> None:
        self._pending: dict[int, PendingCall] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._pending)

    def add(
        self, command: Callable[[int], Any], requests: Sequence[NewRequest] = (), *, resend: bool = True
    ) -> tuple[int, PendingCall]:
        """Add a call. Returns its number and the call. lasts: whether it is sent again after a restart."""
        number, question = self._count, PendingCall(command, requests, resend=resend)
        self._count += 1
        self._pending[number] = question
        return number, question

    def pop(self, number: int) -> PendingCall | None:
        """Remove and return a call; None if it is not pending."""
        return self._pending.pop(number, None)

    def to_send(self, *, allow_adds: bool) -> Iterator[tuple[int, PendingCall]]:
        """Unsent calls that may be sent now. The caller must set `sent` before it takes the next one.

        adding: whether calls that add requests may be sent.
        """
        adders = [question for question in self._pending.values() if question.requests]
        one_by_one = any(one.was_pending_at_crash for one in adders)
        for number, question in list(self._pending.items()):
            if question.sent or question.answer.done():
                continue
            if question.requests and (not allow_adds or (one_by_one and any(one.sent for one in adders))):
                continue
            yield number, question

    def fail(self, error: Exception) -> None:
        """Set an error on all calls, because no engine will answer."""
        for question in self._pending.values():
            if not question.answer.done():
                question.answer.set_exception(error)

    def mark_unsent(self) -> None:
        """Mark all calls as unsent after a restart, and remove those that do not last."""
        self._pending = {number: question for number, question in self._pending.items() if question.resend}
        for question in self._pending.values():
            question.sent = False

    def record_crash(self) -> list[PendingCall]:
        """Record the death of an engine without a committed step. Returns the calls that have reached DEATHS."""
        asked = [question for question in self._pending.values() if question.sent and question.requests]
        for question in asked:
            question.was_pending_at_crash = True
            question.num_crashes += len(asked) == 1
        return [question for question in asked if question.num_crashes >= MAX_CRASHES]
