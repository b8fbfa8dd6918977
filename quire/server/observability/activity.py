"""One line of figures every ten seconds, while the engine has work."""

import time
from collections.abc import Callable

from quire.engine.engine import EngineStats

INTERVAL = 10.0  # seconds between lines
_COUNTERS = ("prompt_tokens", "generation_tokens", "prefix_query_tokens", "prefix_hit_tokens", "num_preemptions")


class ActivityLine:
    """Reports requests, tokens per second, prefix hits, running prompts and KV use. Silent without work."""

    def __init__(
        self,
        get_stats: Callable[[], EngineStats],
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._get_stats = get_stats
        self._report = report
        self._clock = clock
        self._last = clock()
        self._counted = get_stats()

    def update(self) -> None:
        """Report the time since the last line, if a line is due."""
        seconds = self._clock() - self._last
        if seconds < INTERVAL:
            return
        stats = self._get_stats()
        prompt, output, queried, hits, preempted = (
            getattr(stats, name) - getattr(self._counted, name) for name in _COUNTERS
        )
        self._last, self._counted = self._last + seconds, stats
        if not (prompt + output + stats.num_running + stats.num_waiting):
            return
        computed = (prompt - hits) / seconds
        progress = f"{stats.prompts}," if stats.prompts.num_prompts else str(stats.prompts)
        line = f"{stats.num_running} running, {stats.num_waiting} waiting; {progress} {computed:,.0f} tokens/s"
        if queried:
            line += f", {hits / queried:.0%} cached"
        used = stats.kv_blocks_used / max(1, stats.kv_blocks_total)
        line += f"; output {output / seconds:,.0f} tokens/s; KV {used:.0%} used"
        if stats.state_blocks_total:
            line += f", {stats.num_snapshots} snapshots of states"
        if preempted:
            line += f"; {preempted} preemptions"
        self._report(f"{time.strftime('%H:%M:%S')}   {line}")
