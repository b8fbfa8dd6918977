"""Replay identity: with the durations, tokens and clock readings of a live engine, the simulator plans the same Steps.

The live engine runs the embedded model on the real kernels. Its journal has its inputs and its Steps. The simulator is
given the same requests, and a runner that returns the recorded results.
"""

from collections import deque
from random import Random

from quire.cache.kv_cache import KVCache
from quire.config import EngineOptions
from quire.core import step as steps
from quire.core.capabilities import Capabilities
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.params import SamplingParams
from quire.scheduler.journal import Abort, Add, Calibrate, Commit, Finish, Header, Plan, read_records
from quire.scheduler.scheduler import Scheduler
from quire.startup.build import build


class RecordedRunner:
    """Returns the recorded results in order, and keeps the bytes of the Steps that it got."""

    capabilities = Capabilities()

    def __init__(self, results):
        self.results = deque(results)
        self.launched = []

    def launch(self, step):
        self.launched.append(steps.to_bytes(step))

    def sample(self, step_id, masks, processors=()):
        pass

    def collect(self):
        return self.results.popleft()

    def release_workspace(self):
        pass


def live_journal(path, options):
    """Run requests of many lengths on the embedded model, with aborts and stop strings, and record them."""
    built = build(options, report=lambda line: None, progress=lambda done, total: None)
    engine, rng, number, seqs = built.engine, Random(0), 0, {}
    stem = [rng.randrange(3, 2000) for _ in range(64)]
    while number < 40 or engine.has_work:
        if number < 40 and rng.random() < 0.4:
            prompt = stem[: rng.randrange(0, 64)] + [rng.randrange(3, 2000) for _ in range(rng.randrange(1, 200))]
            params = SamplingParams(
                max_tokens=rng.randrange(1, 40), temperature=rng.choice((0.0, 1.0)), n=rng.choice((1, 1, 3))
            )
            engine.add(Request(str(number), prompt, params))
            if number % 10 == 9:
                engine.abort(str(number))  # none of its tokens can have been its last
            number += 1
        if rng.random() < 0.03:
            engine.abort(str(rng.randrange(number + 1)))
        for output in engine.step() if engine.has_work else ():
            seqs[output.seq_id] = None
            if output.token_ids and output.end is None and rng.random() < 0.01:
                engine.finish(output.seq_id, 1)
    engine.close()
    return path


def test_the_simulators_engine_plans_the_steps_of_the_live_engine(tmp_path):
    path = tmp_path / "journal"
    options = EngineOptions(
        max_num_seqs=6, max_num_batched_tokens=64, memory="48MiB", max_model_len=320, dtype="float32", calibration=0.1,
        journal=str(path), policy="lpm", threads=1,
    )  # fmt: skip
    live_journal(path, options)
    with path.open("rb") as file:
        header, *records = list(read_records(file))
    assert isinstance(header, Header)
    times = deque(one.now for one in records if hasattr(one, "now"))
    runner = RecordedRunner([one.result for one in records if isinstance(one, Commit)])
    scheduler = Scheduler(header.scheduler, KVCache(header.cache))
    built_eos = next(one.request.eos_token_ids for one in records if isinstance(one, Add))
    engine = Engine(scheduler, runner, vocab_size=2048, eos_token_ids=built_eos, clock=times.popleft)
    for record in records:
        match record:
            case Add(request):
                engine.add(request)
            case Abort(request_id):
                engine.abort(request_id)
            case Finish(seq_id, num_tokens):
                engine.finish(seq_id, num_tokens)
            case Calibrate(calibration):
                scheduler.calibrate(calibration)
            case Plan():
                engine.step()  # it plans, runs and commits
            case Commit():
                pass
            case _:
                raise AssertionError(f"the journal has a {type(record).__name__}")
    planned = [one.step for one in records if isinstance(one, Plan) and one.step]
    assert len(planned) > 100
    assert runner.launched == planned
    assert not times
    assert any(isinstance(one, Abort) for one in records)
