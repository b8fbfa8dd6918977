"""Fake engines on threads, which die on demand. Their outputs are predictable."""

import asyncio
import contextlib
import socket
import threading

from kv_groups import kv_group
from msgspec import structs

from quire.config import CacheConfig, EngineOptions
from quire.core.output import EndCause, Output
from quire.core.request import Request
from quire.engine.engine import EngineStats
from quire.models.sentence_transformers import EmbeddingConfig
from quire.params import SamplingParams
from quire.startup.model_info import ModelInfo
from quire.supervisor.async_engine import AsyncEngine
from quire.supervisor.engine_loop import EngineLoop

FACTS = ModelInfo(
    model_name="pretended",
    architecture="NoneForCausalLM",
    num_parameters=0,
    weight_bytes=0,
    classification=None,
    generates=True,
    embedding=EmbeddingConfig(1),
    path="",
    max_model_len=999,
    vocab_size=999,
    num_end_tokens=0,
    hidden_size=1,
    sampling_defaults={},
    options=EngineOptions(),
    cache=CacheConfig(16, (kv_group((0,), 1, 1, "float32", 9, 64),)),
)


class Death(BaseException):
    """Sudden death of an engine, as far as a thread allows it."""


class PretendEngine:
    """Token i of a request is i. Its prompt is [number of tokens, the token whose step kills the engine, or 0]."""

    predicted_seconds = 0.0
    ahead = 0  # positions computed in advance by a step

    def __init__(self, number, acts):
        self.number = number
        self.acts = acts  # (engine, step, request ids) -> ids that end early in this step; may raise Death
        self.said, self.wanted = {}, {}
        self.last_step_positions = []
        self.num_counted = {}
        self.steps = 0

    @property
    def has_work(self):
        return bool(self.said)

    def add(self, request):
        known = request.known_outputs
        self.said[request.id] = len(known[0].token_ids) if known else 0
        self.wanted[request.id] = request.prompt

    def abort(self, request_id):
        self.said.pop(request_id, None)

    def step(self, on_launch):
        self.last_step_positions = [(name, 2 + said + self.ahead) for name, said in self.said.items()]
        on_launch(None)
        early = self.acts(self.number, self.steps, list(self.said))
        outputs = []
        for name, said in list(self.said.items()):
            wanted, deadly = self.wanted[name]
            if said + 1 == deadly:
                raise Death
            over = said + 1 == wanted or name in early
            outputs.append(Output(name, 0, 100 * self.number, [said + 1], EndCause.LENGTH if over else None))
            self.said[name] += 1
            if over:
                del self.said[name]
        self.steps += 1
        return outputs

    def stats(self):
        return structs.replace(EngineStats.zero(), num_running=len(self.said), kv_blocks_total=9, num_steps=self.steps)

    def close(self):
        pass

    def check_block_accounting(self):
        pass


class Host:
    """An engine handle of fake engines on threads."""

    can_restart = True
    model_info = FACTS
    engine_class = PretendEngine

    def __init__(self, acts):
        self.acts, self.num_launched = acts, 0

    def launch(self):
        self.num_launched += 1
        self.connection, theirs = socket.socketpair()
        loop = EngineLoop(self.engine_class(self.num_launched, self.acts), theirs)

        def run():
            with contextlib.suppress(Death):
                loop.run()

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def dump_stacks(self):
        pass

    def kill(self):
        pass

    def wait(self):
        self.thread.join(60)
        return "as pretended"


def request(name, wanted, deadly=0):
    return Request(name, [wanted, deadly], SamplingParams(max_tokens=100))


async def heard(stream, names):
    """Tokens of each request, and its finish reason."""
    tokens, ends = {name: [] for name in names}, {}
    async for outputs in stream:
        for output in outputs:
            tokens[output.request_id] += output.token_ids
            if output.finish_reason:
                ends[output.request_id] = output.finish_reason
        if len(ends) == len(names):
            return tokens, ends


def run(scenario, acts=lambda *_: (), host=None, **options):
    host = host or Host(acts)

    async def main():
        host.launch()
        engine = AsyncEngine(host, **options)
        await engine.start()
        try:
            return await asyncio.wait_for(scenario(host, engine), 60)
        finally:
            await engine.close()

    return asyncio.run(main())
