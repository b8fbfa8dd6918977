"""Cost of HTTP: 64 streams through `quire serve`, and the same 64 queries in process, in turns."""

import sys
from pathlib import Path

from benchmarks.cpu.engines import Engine
from benchmarks.cpu.turns import Turns
from benchmarks.workloads import Workload, unrelated

NUM_STREAMS = 64
_NUM_TOKENS = 64  # per prompt and per output


def streams(name: str, seed: int) -> Workload:
    """64 unrelated queries with 64 prompt and 64 output tokens."""
    return unrelated(name, seed, NUM_STREAMS, _NUM_TOKENS, _NUM_TOKENS)


def http_turns(model: Path, repeat: int) -> Turns:
    """Turns of the server with its client and of the LLM. Both can run all queries at once."""
    settings = {"max_num_seqs": NUM_STREAMS, "max_model_len": 1024}
    engines = [Engine(name, sys.executable, model, **settings) for name in ("http", "quire")]
    return Turns(engines, [f"{NUM_STREAMS} streams"], repeat=repeat, make=streams)
