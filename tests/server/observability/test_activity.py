"""The line of figures that a server prints while it works."""

import msgspec

from quire.core.prompt_progress import PromptProgress
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
        **{"num_running": 3, "num_waiting": 1, "prompt_tokens": 2750, "generation_tokens": 12500},
        **{"prefix_query_tokens": 1000, "prefix_hit_tokens": 250, "kv_blocks_used": 50},
    )
    assert line == "3 running, 1 waiting; prompt 200 tokens/s, 25% cached; output 1,200 tokens/s; KV 25% used"
    (line,) = server.after(2 * INTERVAL, generation_tokens=12700, num_preemptions=2)
    assert line == "3 running, 1 waiting; prompt 0 tokens/s; output 10 tokens/s; KV 25% used; 2 preemptions"


def test_a_line_of_a_model_with_recurrent_states_has_the_number_of_snapshots():
    server = Server()
    (line,) = server.after(INTERVAL, num_running=3, kv_blocks_used=50, state_blocks_total=30, num_snapshots=17)
    assert line.endswith("; KV 25% used, 17 snapshots of states")


def test_activity_lines_are_logged_once_per_interval_and_only_with_work():
    server = Server()
    assert server.after(INTERVAL / 2, generation_tokens=600) == []
    assert len(server.after(INTERVAL / 2)) == 1
    assert server.after(INTERVAL) == []


def test_a_running_prompt_shows_how_far_it_is_and_only_what_was_computed():
    server = Server()
    (line,) = server.after(
        INTERVAL,
        **{"num_running": 1, "prompt_tokens": 500 + 18_400, "prefix_query_tokens": 61_178, "prefix_hit_tokens": 12_900},
        prompts=PromptProgress(1, 18_400, 61_178),
    )
    assert line.startswith("1 running, 0 waiting; prompt 18,400 of 61,178, 550 tokens/s, 21% cached; output 0 tokens/s")
    (line,) = server.after(INTERVAL, prompt_tokens=500 + 23_900, prompts=PromptProgress(2, 25_000, 71_178))
    assert "; 2 prompts 25,000 of 71,178, 550 tokens/s;" in line


def test_work_without_a_token_is_not_silent():
    """Such as one long step, a prompt that is computed again, an engine that is being started again."""
    server = Server()
    assert len(server.after(INTERVAL, num_running=1)) == 1
    assert len(server.after(INTERVAL, num_running=0, num_waiting=1)) == 1
    assert server.after(INTERVAL, num_waiting=0) == []


def test_an_engine_that_is_being_restarted_has_no_blocks():
    assert "KV 0% used" in Server().after(INTERVAL, generation_tokens=600, kv_blocks_total=0)[0]
