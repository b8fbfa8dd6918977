"""An engine process for `benchmarks.routing`, part live: `python -m benchmarks.routing_engine FD`.

The real scheduler, KV cache and message loop. A modelled step takes the time that it would take on the modelled device,
on the clock of the machine. FD: the socket to the front end.
"""

import socket
import sys
import time
from dataclasses import replace

from benchmarks.fleet_engine import FACTS
from quire.cache.kv_cache import KVCache
from quire.config import EngineOptions
from quire.engine.engine import Engine
from quire.planner.modelled_runner import ModelledRunner, VirtualClock
from quire.planner.reproduce.reuse import r3_engine
from quire.planner.simulated_engine import EngineSetup
from quire.scheduler.scheduler import Scheduler
from quire.startup.model_info import ModelInfo
from quire.startup.replica_share import block_keys
from quire.supervisor import protocol
from quire.supervisor.engine_loop import EngineLoop
from quire.supervisor.protocol import Begin, receive_frame


class SleepingClock(VirtualClock):
    """The time of the machine. To advance it is to sleep."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    @property
    def now(self) -> float:  # type: ignore[override]
        """Seconds since the start."""
        return time.monotonic() - self._began

    def __call__(self) -> float:
        """Seconds since the start."""
        return self.now

    def advance_to(self, when: float) -> None:
        """Sleep until then."""
        time.sleep(max(0.0, when - self.now))


def facts_of(setup: EngineSetup) -> ModelInfo:
    """What the front end has to know."""
    scheduler = setup.scheduler
    options = EngineOptions(
        max_num_seqs=scheduler.max_num_seqs, max_num_batched_tokens=scheduler.max_num_batched_tokens
    )
    return replace(
        FACTS,
        max_model_len=scheduler.max_model_len,
        vocab_size=setup.vocab_size,
        options=options,
        cache=setup.cache,
    )


def main() -> None:
    """Serve until the front end closes the socket."""
    setup = r3_engine()
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        message = receive_frame(connection)
        assert message is not None, "the front end begins with Begin"
        (begin,) = protocol.decode_commands(message)
        assert isinstance(begin, Begin)
        scheduler = Scheduler(setup.scheduler, KVCache(setup.cache))
        runner = ModelledRunner(
            setup.profile,
            setup.cache,
            clock := SleepingClock(),
            max_num_seqs=setup.scheduler.max_num_seqs,
            vocab_size=setup.vocab_size,
        )
        engine = Engine(scheduler, runner, vocab_size=setup.vocab_size, clock=clock)
        scheduler.calibrate(setup.profile.calibration(setup.scheduler.max_num_batched_tokens))
        facts = facts_of(setup)
        keys = block_keys(begin.share, facts)
        assert keys is not None, "it has one of several shares"
        engine.report_keys(keys)
        connection.sendall(protocol.encode_frame(protocol.Ready(facts, begin.share)))
        EngineLoop(engine, connection).run()


if __name__ == "__main__":
    main()
