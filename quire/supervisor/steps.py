"""StepsInFlight: which requests an engine was computing, and how far, as it was told before each step."""

from collections import deque
from collections.abc import Container

from quire.supervisor.protocol import Launched


class StepsInFlight:
    """Those of one engine. Positions are the furthest of a request's sequences."""

    def __init__(self) -> None:
        self.num_committed = 0
        self._steps: deque[dict[str, int]] = deque()
        self._names: list[str] = []  # requests of the newest, by row

    def __len__(self) -> int:
        return len(self._steps)

    def launched(self, step: Launched) -> None:
        """A step begins."""
        self._names = self._names if step.names is None else step.names
        rows: dict[str, int] = {}
        for name, position in zip(self._names, step.positions, strict=True):
            rows[name] = max(position, rows.get(name, 0))
        self._steps.append(rows)

    def committed(self, num_steps: int) -> list[dict[str, int]]:
        """So many are committed by now: those that were not before."""
        new = min(num_steps - self.num_committed, len(self._steps))
        self.num_committed = num_steps
        return [self._steps.popleft() for _ in range(new)]

    def at_death(self, known: Container[str]) -> tuple[dict[str, int], int]:
        """Requests of the steps that were not committed, as far as they are known; how many others there were."""
        rows: dict[str, int] = {}
        for step in self._steps:
            for name, position in step.items():
                rows[name] = max(position, rows.get(name, 0))
        open_ones = {name: position for name, position in rows.items() if name in known}
        return open_ones, len(rows) - len(open_ones)
