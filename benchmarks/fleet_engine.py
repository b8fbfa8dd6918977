"""An engine process without a model for `benchmarks.fleet`: `python -m benchmarks.fleet_engine FD`.

Each step sleeps for STEP_SECONDS and gives every request one token. FD: the socket to the front end.
"""

import socket
import sys
import time
from collections.abc import Callable
from typing import Any, cast

import msgspec

from quire.config import CacheConfig, EngineOptions
from quire.core.kv_groups import KVGroup, kv_kind
from quire.core.output import EndCause, Output
from quire.core.request import Request
from quire.engine.engine import Engine, EngineStats
from quire.models.sentence_transformers import EmbeddingConfig
from quire.startup.model_info import ModelInfo
from quire.supervisor import protocol
from quire.supervisor.engine_loop import EngineLoop

STEP_SECONDS = 0.025
FACTS = ModelInfo(
    model_name="none",
    architecture="NoneForCausalLM",
    num_parameters=0,
    weight_bytes=0,
    classification=None,
    generates=True,
    embedding=EmbeddingConfig(1),
    path="",
    max_model_len=2**20,
    vocab_size=2**10,
    num_end_tokens=0,
    hidden_size=1,
    sampling_defaults={},
    options=EngineOptions(),
    cache=CacheConfig(16, (KVGroup((0,), kv_kind(1, 1), "float32", 9, 64),)),
)


class PacedEngine:
    """Gives each request `max_tokens` tokens, one in a step."""

    predicted_seconds = STEP_SECONDS

    def __init__(self) -> None:
        self.last_step_positions: list[tuple[str, int]] = []
        self.num_counted: dict[str, int] = {}
        self._done: dict[str, int] = {}  # request id -> tokens
        self._wanted: dict[str, int] = {}
        self._num_steps = 0

    @property
    def has_work(self) -> bool:
        """Whether there are requests."""
        return bool(self._done)

    def add(self, request: Request) -> None:
        """Begin a request."""
        self._done[request.id], self._wanted[request.id] = 0, request.max_tokens

    def abort(self, request_id: str) -> None:
        """End a request."""
        self._done.pop(request_id, None)

    def step(self, on_launch: Callable[[Any], None]) -> list[Output]:
        """One token of each request."""
        self.last_step_positions = list(self._done.items())
        on_launch(None)
        time.sleep(STEP_SECONDS)
        self._num_steps += 1
        outputs = []
        for index, name in enumerate(list(self._done)):
            self._done[name] += 1
            is_last = self._done[name] == self._wanted[name]
            outputs.append(Output(name, 0, index, [self._done[name] % 1000], EndCause.LENGTH if is_last else None))
            if is_last:
                del self._done[name]
        return outputs

    def stats(self) -> EngineStats:
        """The number of steps and requests."""
        stats = EngineStats.zero()
        return msgspec.structs.replace(stats, num_steps=self._num_steps, num_running=len(self._done))

    def take_key_changes(self) -> None:
        """There are no keys."""

    def take_service(self) -> dict[str, int]:
        """No service is reported."""
        return {}

    def check_block_accounting(self) -> None:
        """There are no blocks."""

    def close(self) -> None:
        """There is nothing to release."""


def main() -> None:
    """Serve until the front end closes the socket."""
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        protocol.receive_frame(connection)  # Begin
        connection.sendall(protocol.encode_frame(protocol.Ready(FACTS)))
        EngineLoop(cast(Engine, PacedEngine()), connection).run()


if __name__ == "__main__":
    main()
