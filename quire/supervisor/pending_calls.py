"""Questions: what an engine is asked, until one has answered. Knows numbers and futures, no messages.

Should an engine die while it is asked, the next one is asked again. Where that may have been the reason (it died
without doing anything else), what adds requests is asked one at a time, until it is known.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from quire.engine.inputs import NewRequest

DEATHS = 3  # of engines that were asked this and nothing else, and never did anything


class Question:
    """One of them."""

    def __init__(self, command: Callable[[int], Any], requests: Sequence[NewRequest], *, lasts: bool) -> None:
        self.command = command  # of its number
        self.requests = requests  # that it adds
        self.lasts = lasts  # it is asked the next engine if this one dies
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.sent = False  # to the engine that runs
        self.was_there = False  # when an engine died that had done nothing
        self.deaths = 0  # of engines that it was alone with


class Questions:
    """Those that are open, by number."""

    def __init__(self) -> None:
        self._open: dict[int, Question] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._open)

    def put(
        self, command: Callable[[int], Any], requests: Sequence[NewRequest] = (), *, lasts: bool = True
    ) -> tuple[int, Question]:
        """A new one, and its number."""
        number, question = self._count, Question(command, requests, lasts=lasts)
        self._count += 1
        self._open[number] = question
        return number, question

    def take(self, number: int) -> Question | None:
        """It is over. None for one that is not open any more."""
        return self._open.pop(number, None)

    def to_send(self, *, adding: bool) -> Iterator[tuple[int, Question]]:
        """Those that the engine that runs is to be asked now, and are before the next one is wanted.

        adding: whether it may take new requests.
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
        """Nobody will answer."""
        for question in self._open.values():
            if not question.answer.done():
                question.answer.set_exception(error)

    def restart(self) -> None:
        """Another engine knows nothing of them."""
        self._open = {number: question for number, question in self._open.items() if question.lasts}
        for question in self._open.values():
            question.sent = False

    def died(self) -> list[Question]:
        """An engine died that had done nothing but hear them: those that are to blame."""
        asked = [question for question in self._open.values() if question.sent and question.requests]
        for question in asked:
            question.was_there = True
            question.deaths += len(asked) == 1
        return [question for question in asked if question.deaths >= DEATHS]
