"""The line of figures that a server prints while it works."""

import msgspec

from quire.engine.engine import EngineStats
from quire.server.observability.activity import INTERVAL, ActivityLine

BEFORE = msgspec.structs.replace(EngineStats.zero(), prompt_tokens=500, generation_tokens=500, kv_blocks_total=200)


class Server:
    def __init__(self):
        self.now, self.stats, self.lines = 0.0, BEFORE, []
        self.activity = ActivityLine(lambda: self.stats, self.lines.append, lambda: self.now)

    def after(self, seconds, **changes):
        self.now += seconds
        self.stats = msgspec.structs.replace(self.stats, **changes)
        self.activity.update()
        lines = [line.partition("   ")[2] for line in self.lines]
        self.lines.clear()
        return lines


def test_a_line_has_the_rates_since_the_last_one():
    server = Server()
    (line,) = server.after(
        INTERVAL,
        **{"num_running": 3, "num_waiting": 1, "prompt_tokens": 2500, "generation_tokens": 12500},
        **{"prefix_query_tokens": 1000, "prefix_hit_tokens": 250, "kv_blocks_used": 50},
    )
    assert line == "3 running, 1 waiting; prompt 200 tokens/s, 25% cached; output 1,200 tokens/s; KV 25% used"
    (line,) = server.after(2 * INTERVAL, generation_tokens=12700, num_preemptions=2)
    assert line == "3 running, 1 waiting; prompt 0 tokens/s; output 10 tokens/s; KV 25% used; 2 preemptions"


def test_activity_lines_are_logged_once_per_interval_and_only_with_work():
    server = Server()
    assert server.after(INTERVAL / 2, generation_tokens=600) == []
    assert len(server.after(INTERVAL / 2)) == 1
    assert server.after(INTERVAL) == []


def test_an_engine_that_is_being_restarted_has_no_blocks():
    assert "KV 0% used" in Server().after(INTERVAL, generation_tokens=600, kv_blocks_total=0)[0]
