"""Engine processes without torch and without a model: `python scripted_engine_process.py KIND [STEP] FD`.

Stand for `python -m quire.supervisor` where its model does not matter: they start in a fifth of the time. The main
function, the engine and the scheduler are those of quire; the runner is ScriptedRunner. KIND is one of `KINDS`, FD the
file descriptor of the socket to the front end.
"""

import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from fake_engines import FACTS
from kv_groups import kv_group

from quire.cache.kv_cache import KVCache
from quire.config import CacheConfig, SchedulerConfig
from quire.engine.engine import Engine
from quire.errors import ModelError
from quire.runner.scripted_runner import ScriptedRunner
from quire.scheduler.scheduler import Scheduler
from quire.startup.model_info import ModelInfo
from quire.startup.replica_share import WHOLE, ReplicaShare

POISON = 2040  # a token id
SECONDS_PER_STEP = 0.005  # of a "slow" engine
VOCAB = 2048


def steady(step):
    """Run the step."""


def slow(step):
    """Take time for the step."""
    time.sleep(SECONDS_PER_STEP)


def held(step, number):
    """Never end the step with the number `number`."""
    while step.id >= int(number):
        time.sleep(60)


def deadly(step):
    """Die of a step with POISON in a prompt."""
    if POISON in step.tokens.values:
        os.kill(os.getpid(), signal.SIGSEGV)


KINDS = {function.__name__: function for function in (steady, slow, held, deadly)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Built(ModelInfo):
    """A scripted engine and its model information."""

    engine: Engine
    share: ReplicaShare


def builder(kind, *arguments):
    """Returns a function in place of `quire.startup.build.build`. The model's name says whether it is a restart."""

    class Runner(ScriptedRunner):
        def launch(self, step):
            KINDS[kind](step, *arguments)
            super().launch(step)

    def build(options, *, report, progress, is_restart=False, share=WHOLE):
        if options.model is not None and not Path(options.model).exists():
            raise ModelError(f"there is no model {options.model}")
        most = {"max_num_seqs": options.max_num_seqs or 32, "max_model_len": options.max_model_len or 512}
        cache = CacheConfig(16, (kv_group((0,), 1, 8, "float32", 2048, 4096),), "radix")
        tokens = options.max_num_batched_tokens or 512
        config = SchedulerConfig(
            max_num_batched_tokens=tokens, step_seconds=0.5, watermark=0.01, steps_in_flight=1, **most
        )
        engine = Engine(Scheduler(config, KVCache(cache)), Runner(cache, vocab_size=VOCAB, **most), vocab_size=VOCAB)
        facts = {name: getattr(FACTS, name) for name in ModelInfo.__slots__}
        facts |= {"model_name": "restarted" if is_restart else "first", "options": options, "cache": cache}
        facts |= {"max_model_len": most["max_model_len"], "vocab_size": VOCAB}
        return Built(engine=engine, share=share, **facts)

    return build


if __name__ == "__main__":
    without_torch = sys.modules["quire.startup.build"] = ModuleType("quire.startup.build")
    without_torch.Built, without_torch.build = Built, builder(*sys.argv[1:-1])
    from quire.supervisor.engine_main import run  # imports `build`, which would import torch

    with socket.socket(fileno=int(sys.argv[-1])) as connection:
        run(connection, without_torch.build)
