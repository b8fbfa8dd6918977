"""Updates of a viewer put together: the whole state from a full update and later ones. Slow and obvious."""


def expand(runs: str) -> list[str]:
    states = []
    for run in runs.split(","):
        state, length = run.split("*")
        states += [state] * int(length)
    return states


class ViewerState:
    """What a page knows after the updates so far. `update` values are decoded JSON."""

    def __init__(self):
        self.last = None

    def apply(self, update):
        if update["full"]:
            self.blocks = {}
            self.host_blocks = {}
            self.nodes = {}
            self.steps = {}
        assert self.last is not None or update["full"], "the first update is whole"
        for field in ("blocks", "host_blocks"):
            pools = getattr(self, field)
            for pool, first, runs in update[field]:
                states = expand(runs)
                if update["full"]:
                    assert first == 0
                    pools[pool] = states
                else:
                    assert first + len(states) <= len(pools[pool])
                    pools[pool][first : first + len(states)] = states
        for number in (*update["tree"]["evicted"], *update["tree"]["hidden"]):
            self.nodes.pop(number, None)
        for row in update["tree"]["nodes"]:
            self.nodes[row[0]] = row
        for row in update["steps"]:
            self.steps[row[0]] = row
        self.last = update

    @property
    def whole(self):
        """Everything that a full update has."""
        same = {
            k: v for k, v in self.last.items() if k not in ("full", "blocks", "host_blocks", "tree", "steps", "now")
        }
        counts = self.last["tree"]["num_nodes"], self.last["tree"]["shown"]
        steps = sorted(self.steps.values())[-256:]
        return {
            **same,
            "blocks": self.blocks,
            "host": self.host_blocks,
            "nodes": self.nodes,
            "counts": counts,
            "steps": steps,
        }


def whole(update) -> dict:
    """The state of one full update."""
    state = ViewerState()
    state.apply(update)
    return state.whole
