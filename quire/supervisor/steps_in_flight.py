"""The steps that an engine has launched and not committed, as the front end knows them."""

from collections import deque
from collections.abc import Container

from quire.supervisor.protocol import Launched


class StepsInFlight:
    """Uncommitted steps of one engine, each as request id -> last position over the request's sequences."""

    def __init__(self) -> None:
        self.num_committed = 0
        self._steps: deque[dict[str, int]] = deque()
        self._names: list[str] = []  # request ids of the newest step, by row

    def __len__(self) -> int:
        return len(self._steps)

    def record_launch(self, step: Launched) -> None:
        """Record the launch of a step."""
        self._names = self._names if step.names is None else step.names
        rows: dict[str, int] = {}
        for name, position in zip(self._names, step.positions, strict=True):
            rows[name] = max(position, rows.get(name, 0))
        self._steps.append(rows)

    def record_commits(self, num_steps: int) -> list[dict[str, int]]:
        """Record that `num_steps` steps are committed in total. Returns the newly committed ones, oldest first."""
        new = min(num_steps - self.num_committed, len(self._steps))
        self.num_committed = num_steps
        return [self._steps.popleft() for _ in range(new)]

    def at_crash(self, open_ids: Container[str]) -> tuple[dict[str, int], int]:
        """(positions of the uncommitted steps' requests that are in `open_ids`, number of their other requests)."""
        rows: dict[str, int] = {}
        for step in self._steps:
            for name, position in step.items():
                rows[name] = max(position, rows.get(name, 0))
        open_ones = {name: position for name, position in rows.items() if name in open_ids}
        return open_ones, len(rows) - len(open_ones)
