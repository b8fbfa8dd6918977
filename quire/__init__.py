"""quire: an LLM serving engine.

Most programs need `from quire import LLM, SamplingParams`. The public names are imported on first access, because the
control plane (`quire.core`, `quire.scheduler`, ...) and `quire --help` import this package and must not wait for torch.
`__init__.pyi` has their types.
"""

import os

from quire.preload import import_late, import_with_torch

__version__ = "0.1.0"

# OpenMP threads wait for each other by spinning. With the default spin count each wait costs a time slice on a busy
# machine. libgomp reads this variable when torch loads it. A value set by the user is kept. See docs/performance.md.
os.environ.setdefault("GOMP_SPINCOUNT", "4000")  # about 200 us

_HOMES = {
    "LLM": "quire.llm",
    "SamplingParams": "quire.params",
    "BeamSearchParams": "quire.params",
    "LoRARequest": "quire.params",
    "ReasoningParams": "quire.params",
    "RepetitionDetectionParams": "quire.params",
    "StructuredOutputsParams": "quire.params",
    "Retention": "quire.core.scheduling_params",
    "RequestOutput": "quire.engine.outputs",
    "CompletionOutput": "quire.engine.outputs",
    "BeamSearchOutput": "quire.engine.outputs",
    "BeamSearchSequence": "quire.engine.outputs",
    "EmbeddingRequestOutput": "quire.engine.outputs",
    "EmbeddingOutput": "quire.engine.outputs",
    "ClassificationRequestOutput": "quire.engine.outputs",
    "ClassificationOutput": "quire.engine.outputs",
    "ScoringRequestOutput": "quire.engine.outputs",
    "ScoringOutput": "quire.engine.outputs",
    "bench_latency": "quire.terminal.bench",
    "bench_serve": "quire.terminal.bench",
    "bench_throughput": "quire.terminal.bench",
    "calibrate": "quire.startup.latency_calibration",
    "examine": "quire.startup.doctor",
    "plan": "quire.planner.report",
    "quantize": "quire.startup.quantize",
    "replay_journal": "quire.fleet.routing_journal",
    "reproduce": "quire.planner.reproduce.run",
    "run_batch": "quire.server.batch.run",
    "serve": "quire.server.serve",
    "show_journal": "quire.server.replay",
    "simulate": "quire.planner.simulate",
}
_WITH_TORCH = (
    "quire.llm",
    "quire.planner.report",
    "quire.planner.reproduce.run",
    "quire.planner.simulate",
    "quire.startup.doctor",
    "quire.startup.latency_calibration",
    "quire.startup.quantize",
)
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    home = _HOMES[name]
    return getattr(import_with_torch(home) if home in _WITH_TORCH else import_late(home), name)
