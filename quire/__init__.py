"""quire: an LLM serving engine.

`from quire import LLM, SamplingParams` is what most programs need. These names are looked up when
they are first asked for, which is the one lazy import in quire: the mind (`quire.core`, `quire.scheduler`,
...) and `quire --help` must not wait for torch, and both import this file. Their types are in
`__init__.pyi`.
"""

import os
from importlib import import_module

__version__ = "0.1.0"

# OpenMP's threads wait for each other by spinning, by default so long that on a busy machine each wait costs a time
# slice. libgomp reads this when torch loads it; whoever set it otherwise is left alone. See docs/performance.md.
os.environ.setdefault("GOMP_SPINCOUNT", "4000")  # some 200 us

_HOMES = {
    "LLM": "quire.llm",
    "SamplingParams": "quire.params",
    "BeamSearchParams": "quire.params",
    "StructuredOutputsParams": "quire.params",
    "Retention": "quire.core.scheduling_params",
    "RequestOutput": "quire.engine.outputs",
    "CompletionOutput": "quire.engine.outputs",
    "BeamSearchOutput": "quire.engine.outputs",
    "BeamSearchSequence": "quire.engine.outputs",
    "EmbeddingRequestOutput": "quire.engine.outputs",
    "EmbeddingOutput": "quire.engine.outputs",
    "examine": "quire.startup.doctor",
    "run_batch": "quire.server.batch.run",
    "serve": "quire.server.serve",
}
_WITH_TORCH = ("quire.llm", "quire.startup.doctor")
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    home = _HOMES[name]
    if home in _WITH_TORCH:
        from quire.preload import import_with_torch  # noqa: PLC0415  (`quire --help` waits for nothing that it can do without)

        return getattr(import_with_torch(home), name)
    return getattr(import_module(home), name)
