"""Program hints on the workloads of benchmarks.programs."""

from benchmarks.programs.driver import Driver
from benchmarks.programs.servers import Setup, Virtual
from benchmarks.programs.workloads import starts


def test_a_cache_too_small_for_all_programs_computes_less_with_hints():
    rows = [
        Driver(Virtual(Setup("fcfs", "lru", num_blocks=512)), hints).run(starts("tree of thought", 25, 40.0, 0))
        for hints in ("plain", "hints")
    ]
    assert rows[1].counted.num_prompt_tokens == rows[0].counted.num_prompt_tokens
    assert rows[1].counted.num_computed_tokens < 0.8 * rows[0].counted.num_computed_tokens
    assert rows[1].mean_latency < rows[0].mean_latency
