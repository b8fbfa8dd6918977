"""The rig tests/rigs/small_engines.py for benchmarks, which run without its folder on their path."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "rigs"))
from small_engines import limits, memory, poisson, request, result_of, simulated

__all__ = ["limits", "memory", "poisson", "request", "result_of", "simulated"]
