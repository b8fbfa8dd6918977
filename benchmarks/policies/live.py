"""The flood again, on the embedded model and in real time."""

import time
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.policies.fair import Load, arrivals, percentile
from benchmarks.policies.virtual import Arrival
from quire.cache.kv_cache import KVCache
from quire.config import EngineOptions, Policy
from quire.engine.build import prepare
from quire.engine.engine import Engine
from quire.runner.torch_runner import TorchRunner
from quire.sched.scheduler import Scheduler

_MAX_NUM_SEQS = 16
_STEP_TOKENS = 256
_SHARE = 0.45  # of what the machine can do, that the loud tenant usually needs; the quiet one needs half of that


class Embedded:
    """The embedded model, loaded once."""

    def __init__(self) -> None:
        options = EngineOptions(memory="1GiB", max_num_seqs=_MAX_NUM_SEQS, max_num_batched_tokens=_STEP_TOKENS)
        self._prepared = prepare(options, report=_ignore, progress=_ignore)
        files = self._prepared.files
        self._model = files.load(self._prepared.dtype, self._prepared.device, _ignore)
        self._model.pack(self._prepared.chosen.kernels)
        self.vocab_size: int = files.description.vocab_size

    def engine(self, policy: Policy) -> Engine:
        """A new one."""
        limits, cache = replace(self._prepared.limits, policy=policy), self._prepared.cache
        runner = TorchRunner(
            self._model,
            self._prepared.chosen.kernels,
            cache=cache,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            strict=self._prepared.chosen.strict,
        )
        return Engine(Scheduler(limits, KVCache(cache)), runner, vocab_size=self.vocab_size)


def _ignore(*_: object) -> None:
    """Lines and bytes that nobody waits for."""


def play(engine: Engine, requests: Sequence[Arrival], vocab_size: int, most: float) -> dict[str, list[float]]:
    """Seconds to the first token by tenant, until the quiet one's requests are answered; `most` seconds at most.

    Infinite where it has not come by then.
    """
    came: dict[str, float] = {}
    first: dict[str, float] = {}
    unanswered = {one.request.id for one in requests if one.request.namespace.tenant == "quiet"}
    begin, at = time.perf_counter(), 0
    while unanswered and (now := time.perf_counter() - begin) < most:
        while at < len(requests) and requests[at].at <= now:
            asked = requests[at].request
            prompt = [token % vocab_size for token in asked.prompt]
            engine.add(asked.id, prompt, asked.params, namespace=asked.namespace)
            came[asked.id] = requests[at].at
            at += 1
        if not engine.has_work:
            time.sleep(max(0.0, requests[at].at - now))
            continue
        for output in engine.step():
            if output.token_ids:
                first.setdefault(output.request_id, time.perf_counter() - begin)
                unanswered.discard(output.request_id)
    waits: dict[str, list[float]] = {}
    for one in requests[:at]:
        wait = first.get(one.request.id, float("inf")) - came[one.request.id]
        waits.setdefault(one.request.namespace.tenant, []).append(wait)
    return waits


def capacity(embedded: Embedded, load: Load) -> float:
    """Requests a second that the machine ends when there are always enough."""
    engine = embedded.engine("fcfs")
    requests = arrivals({"all": load}, 4 * _MAX_NUM_SEQS / load.rate, 99)
    for one in requests:
        prompt = [token % embedded.vocab_size for token in one.request.prompt]
        engine.add(one.request.id, prompt, one.request.params)
    begin = time.perf_counter()
    while engine.has_work:
        engine.step()
    return len(requests) / (time.perf_counter() - begin)


def live(*, quick: bool = False) -> dict[str, object]:
    """The quiet tenant's 99th percentile of seconds to the first token, as usual and while the other sends 10x."""
    embedded = Embedded()
    shape = Load(10.0, num_prompt=160, num_output=32)
    able = capacity(embedded, shape)
    quiet, loud = replace(shape, rate=_SHARE / 2 * able), replace(shape, rate=_SHARE * able)
    seconds = 5.0 if quick else 60.0
    rows: dict[str, object] = {"requests a second that the machine does": able}
    for policy in ("fcfs", "fair"):
        found = []
        for flood in (1.0, 10.0):
            loads = {"quiet": quiet, "loud": replace(loud, rate=flood * loud.rate)}
            engine = embedded.engine(policy)
            found.append(play(engine, arrivals(loads, seconds, 1), embedded.vocab_size, 3 * seconds))
        before, after = (percentile(waits["quiet"], 0.99) for waits in found)
        rows[policy] = {"usual_s": before, "flooded_s": after, "moved": after / before - 1}
    return rows
