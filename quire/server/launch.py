"""Launch: an engine process, and the service in front of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from quire.config import EngineOptions, with_bounded_queue
from quire.server.service import Service
from quire.supervisor.async_engine import AsyncEngine
from quire.supervisor.launcher import EngineProcess
from quire.tokenizer.load import open_tokenizer

CALIBRATION_SECONDS = 1.0  # at most; a small model needs less


@contextmanager
def launched(
    options: EngineOptions,
    model_name: str | None = None,
    *,
    watchdog: float = 0.0,
    report: Callable[[str], None],
    progress: Callable[[int, int], None],
) -> Iterator[Service]:
    """A service whose engine runs in a process of its own, and is ready; at the end that process is gone.

    watchdog: seconds after which a stalled engine is started anew. Raises ConfigError, ModelError, EngineStopped.
    """
    host = EngineProcess(for_a_server(options), report=report, progress=progress)
    host.launch()
    try:
        tokenizer = open_tokenizer(Path(host.facts.path))
        yield Service(host.facts, tokenizer, AsyncEngine(host, watchdog=watchdog), model_name)
    finally:
        host.kill()
        host.wait()


def for_a_server(options: EngineOptions) -> EngineOptions:
    """A server takes the time to learn its costs before requests come, and its queue is bounded, unless told not to."""
    if options.calibration is None:
        options = replace(options, calibration=CALIBRATION_SECONDS)
    return with_bounded_queue(options)
