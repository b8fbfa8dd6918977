"""Engine processes with faults: `python misbehaving_engine_process.py KIND FD`.

KIND is one of the functions below, FD the file descriptor of the socket to the front end.
"""

import socket
import sys
import time

import msgspec

from quire.runner.model_runner import TorchRunner
from quire.startup import build as building
from quire.supervisor.engine_main import run

SECONDS_PER_TOKEN = 0.0015


def slow(options, **more):
    """An engine that takes SECONDS_PER_TOKEN longer for each token."""

    class SlowRunner(TorchRunner):
        def launch(self, step):
            self.size = step.num_tokens
            super().launch(step)

        def collect(self):
            seconds = SECONDS_PER_TOKEN * self.size
            time.sleep(seconds)
            result = super().collect()
            return msgspec.structs.replace(result, seconds=result.seconds + seconds)

    building.TorchRunner = SlowRunner
    return building.build(options, **more)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[2])) as connection:
        run(connection, globals()[sys.argv[1]])
