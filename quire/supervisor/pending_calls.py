"""Calls that wait for an answer of the engine.

If the engine dies before it answers, the call is sent to the next engine. If the engine died without committing a
step, a call that adds requests may be the cause: such calls are then sent one at a time, until the cause is found.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from quire.engine.inputs import NewRequest

DEATHS = 3  # crashes with only this call pending and no committed step, after which the call fails


class Question:
    """A pending call."""

    def __init__(self, command: Callable[[int], Any], requests: Sequence[NewRequest], *, lasts: bool) -> None:
        self.command = command  # call number -> message
        self.requests = requests  # requests that the call adds
        self.lasts = lasts  # whether it is sent again to the next engine
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.sent = False  # to the current engine
        self.was_there = False  # whether it was pending when an engine died without a committed step
        self.deaths = 0  # such crashes in which it was the only call that adds requests


class Questions:
    """Pending calls by number."""

    def __init__(self) -> None:
        self._open: dict[int, Question] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._open)

    def put(
        self, command: Callable[[int], Any], requests: Sequence[NewRequest] = (), *, lasts: bool = True
    ) -> tuple[int, Question]:
        """Add a call. Returns its number and the call. lasts: whether it is sent again after a restart."""
        number, question = self._count, Question(command, requests, lasts=lasts)
        self._count += 1
        self._open[number] = question
        return number, question

    def take(self, number: int) -> Question | None:
        """Remove and return a call; None if it is not pending."""
        return self._open.pop(number, None)

    def to_send(self, *, adding: bool) -> Iterator[tuple[int, Question]]:
        """Unsent calls that may be sent now. The caller must set `sent` before it takes the next one.

        adding: whether calls that add requests may be sent.
        """
        adders = [question for question in self._open.values() if question.requests]
        one_by_one = any(one.was_there for one in adders)
        for number, question in list(self._open.items()):
            if question.sent or question.answer.done():
                continue
            if question.requests and (not adding or (one_by_one and any(one.sent for one in adders))):
                continue
            yield number, question

    def fail(self, error: Exception) -> None:
        """Set an error on all calls, because no engine will answer."""
        for question in self._open.values():
            if not question.answer.done():
                question.answer.set_exception(error)

    def restart(self) -> None:
        """Mark all calls as unsent after a restart, and remove those that do not last."""
        self._open = {number: question for number, question in self._open.items() if question.lasts}
        for question in self._open.values():
            question.sent = False

    def died(self) -> list[Question]:
        """Record the death of an engine without a committed step. Returns the calls that have reached DEATHS."""
        asked = [question for question in self._open.values() if question.sent and question.requests]
        for question in asked:
            question.was_there = True
            question.deaths += len(asked) == 1
        return [question for question in asked if question.deaths >= DEATHS]
