"""Engine processes that misbehave: `python front_children.py KIND FILE`, KIND being one of the functions below."""

import os
import signal
import socket
import sys
import time

import msgspec

from quire.runner.model_runner import TorchRunner
from quire.startup import build as building
from quire.supervisor.engine_main import run

POISON = 2040  # a token
SECONDS_PER_TOKEN = 0.0015


def deadly(options, **more):
    """Dies of a step that brings POISON in a prompt."""
    built = building.build(options, **more)
    runner = built.engine._runner
    launch = runner.launch

    def die(step):
        if POISON in step.tokens.values:
            os.kill(os.getpid(), signal.SIGSEGV)
        launch(step)

    runner.launch = die
    return built


def slow(options, **more):
    """Takes its time for each token."""

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
