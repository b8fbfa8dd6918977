"""Fake engines on threads, which die on demand. Their outputs are predictable."""

import asyncio
import contextlib
import socket
import threading
import time

import waiting
from kv_groups import kv_group
from msgspec import structs

from quire.config import CacheConfig, EngineOptions
from quire.core.explanation import Explanation
from quire.core.output import EndCause, Output
from quire.core.request import Request
from quire.cost.step_time import CostFigures
from quire.engine.engine import EngineStats
from quire.errors import EngineStopped
from quire.fleet.fleet import Fleet
from quire.models.sentence_transformers import EmbeddingConfig
from quire.params import SamplingParams
from quire.startup.model_info import ModelInfo
from quire.startup.replica_share import WHOLE
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

    def take_key_changes(self):
        return None

    def take_service(self):
        return {}

    def close(self):
        pass

    def check_block_accounting(self):
        pass

    def cost_figures(self):
        return CostFigures(0.0, 0.0, 0.0, 0.0, None, None)


class Host:
    """An engine handle of fake engines on threads."""

    can_restart = True
    was_killed = False
    model_info = FACTS
    share = WHOLE
    engine_class = PretendEngine

    def __init__(self, acts):
        self.acts, self.num_launched = acts, 0

    def launch(self):
        self.num_launched += 1
        self.connection, self.engine_socket = socket.socketpair()
        loop = EngineLoop(self.engine_class(self.num_launched, self.acts), self.engine_socket)

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


class ControlledEngine(PretendEngine):
    """Does what its host says. Its sequence ids are 0, 1, ... in the order of adding."""

    predicted_seconds = 0.001

    def __init__(self, number, acts, host):
        super().__init__(number, acts)
        self.host, self.killed = host, threading.Event()
        self.seq_ids, self.arrived = {}, {}
        self.num_added = 0

    def add(self, request):
        self.host.asked.append(request)
        if self.host.refusal is not None:
            raise self.host.refusal
        super().add(request)
        self.seq_ids[request.id], self.num_added = self.num_added, self.num_added + 1
        self.arrived[request.id] = time.monotonic() - request.waited
        self.host.added.append(request)

    def abort(self, request_id):
        if request_id in self.said:
            self.host.aborted.append(request_id)
        super().abort(request_id)

    def finish(self, seq_id, num_tokens):
        self.host.finished.append((seq_id, num_tokens))
        for name in [name for name in self.said if self.seq_ids[name] == seq_id]:
            del self.said[name]

    def end_program(self, *program):
        self.host.ended_programs.append(program)

    def pin_adapter(self, adapter, *, pinned):
        if pinned and self.host.pin_refusal is not None:
            raise self.host.pin_refusal
        self.host.pins.append((adapter.name, pinned))

    def take_service(self):
        return self.host.given.pop(0) if self.host.given else {}

    def served_elsewhere(self, service):
        self.host.heard.append(service)

    def flush_cache(self):
        return self.host.freed

    def explain(self, request_id):
        if request_id not in self.arrived:
            return None
        arrived, number = self.arrived[request_id], self.host.freed
        return Explanation(request_id=request_id, tenant="", arrived=arrived, num_prompt_tokens=number)

    def step(self, on_launch):
        outputs = super().step(on_launch)
        seq_ids = self.seq_ids
        return [structs.replace(output, seq_id=seq_ids[output.request_id]) for output in outputs]


class ControlledHost(Host):
    """A host of one replica of several. Its engines wait in a step for `gate`, and in their start for `may_start`.

    refusal, pin_refusal: the errors of all Adds and pins. freed: result of flush_cache, by which it is known. given:
    the service that the next messages report. heard: that of other replicas.
    dies_at_once: engines after the first that end before their first message.
    """

    def __init__(self, acts=lambda *_: (), freed=0):
        super().__init__(acts)
        self.gate, self.may_start = threading.Event(), threading.Event()
        self.gate.set()
        self.may_start.set()
        self.refusal = self.pin_refusal = None
        self.dies_at_once = 0
        self.freed, self.was_killed, self.is_held = freed, False, False
        self.given, self.heard = [], []
        self.asked, self.added, self.aborted, self.finished, self.pins, self.ended_programs = [], [], [], [], [], []

    @property
    def names(self):
        """The ids of the requests that its engines have accepted."""
        return [request.id for request in self.added]

    def launch(self):
        self.was_killed, self.start_was_killed = False, False
        while not self.may_start.wait(0.002):
            if self.start_was_killed:
                raise EngineStopped("killed while it started")
        if self.num_launched and self.dies_at_once:
            self.dies_at_once -= 1
            self.connection, theirs = socket.socketpair()
            theirs.close()
        else:
            super().launch()

    def engine_class(self, number, acts):
        def acts_of_step(*step):
            while not self.gate.wait(0.002):
                self.is_held = True
                if engine.killed.is_set():
                    raise Death
            self.is_held = False
            return acts(*step)

        self.engine = engine = ControlledEngine(number, acts_of_step, self)
        return engine

    def kill(self):
        self.was_killed = self.start_was_killed = True
        self.fault()

    def fault(self):
        """End the engine as if by a fault of its own."""
        self.engine.killed.set()
        with contextlib.suppress(OSError):
            self.engine_socket.shutdown(socket.SHUT_RDWR)


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
    return run_fleet(lambda engine, _: scenario(host, engine), host, **options)


def run_fleet(scenario, *hosts, **options):
    """Run `scenario(fleet, *hosts)` with a replica for each host."""

    async def main():
        for host in hosts:
            host.launch()
        fleet = Fleet(*hosts, **options)
        await fleet.start()
        try:
            return await asyncio.wait_for(scenario(fleet, *hosts), waiting.DEADLINE)
        finally:
            for host in hosts:
                if isinstance(host, ControlledHost):
                    host.gate.set()
            await fleet.close()

    return asyncio.run(main())
