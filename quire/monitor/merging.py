"""Updates put together: the state after some changes, as one full update. Works on decoded JSON."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from quire.scheduler.step_log import MOST_STEPS

Decoded = dict[str, Any]  # an update


class MergedUpdates:
    """The state after a full update and the later ones that were applied."""

    def __init__(self, first: Decoded) -> None:
        """first: a full update."""
        self._start(first)

    def _start(self, first: Decoded) -> None:
        self._last = first
        self._blocks = {name: _expanded_pools(first[name]) for name in ("blocks", "host_blocks")}
        self._nodes: dict[int, Sequence[object]] = {row[0]: row for row in first["tree"]["nodes"]}
        self._steps: dict[int, Sequence[object]] = {row[0]: row for row in first["steps"]}

    def apply(self, update: Decoded) -> None:
        """Apply the next update."""
        if update["full"]:
            self._start(update)
            return
        self._last = update
        for name, pools in self._blocks.items():
            for pool, first, runs in update[name]:
                states = _expanded(runs)
                pools[pool][first : first + len(states)] = states
        for number in (*update["tree"]["evicted"], *update["tree"]["hidden"]):
            self._nodes.pop(number, None)
        self._nodes.update((row[0], row) for row in update["tree"]["nodes"])
        self._steps.update((row[0], row) for row in update["steps"])
        for step in sorted(self._steps)[:-MOST_STEPS]:
            del self._steps[step]

    def node(self, number: int) -> Sequence[Any] | None:
        """The row of a node; None if there is none with this id."""
        return self._nodes.get(number)

    def full(self) -> Decoded:
        """The state as a full update."""
        tree = {**self._last["tree"], "nodes": list(self._nodes.values()), "evicted": [], "hidden": []}
        blocks = {name: _encoded_pools(pools) for name, pools in self._blocks.items()}
        return {
            **self._last,
            **blocks,
            "full": True,
            "tree": tree,
            "steps": [self._steps[i] for i in sorted(self._steps)],
        }


def _expanded_pools(runs: Sequence[Sequence[Any]]) -> dict[int, list[str]]:
    return {pool: _expanded(text) for pool, _, text in runs}


def _expanded(runs: str) -> list[str]:
    states: list[str] = []
    for run in runs.split(","):
        state, _, length = run.rpartition("*")
        states += [state] * int(length)
    return states


def _encoded_pools(pools: Mapping[int, list[str]]) -> list[tuple[int, int, str]]:
    return [
        (pool, 0, ",".join(f"{one}*{len(list(run))}" for one, run in groupby(some))) for pool, some in pools.items()
    ]
