"""The papers' baselines: contiguous slabs of a buddy allocator, in the simulator and live."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config import EngineOptions
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.errors import ConfigError
from quire.params import BeamSearchParams, SamplingParams
from quire.planner.baselines import BASELINES, BuddyPool, baseline_configs, baseline_setup
from quire.planner.kv_meter import KVMeter
from quire.planner.simulated_engine import paged_cache
from quire.planner.simulation import Simulation
from quire.planner.workloads import Part, Session, Turn, make_workload
from quire.runner.model_runner import TorchRunner
from quire.scheduler.beam_search import plan_beams
from quire.scheduler.scheduler import Scheduler
from quire.startup.build import build, prepare
from tests.planner.test_simulation import setup_of


@given(
    num_blocks=st.integers(1, 70),
    asked=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), max_size=40),
)
def test_runs_of_a_buddy_pool_never_overlap_and_join_again(num_blocks, asked):
    pool, held = BuddyPool(num_blocks), []
    for count, victim in asked:
        run = pool.allocate_run(count)
        if run is not None:
            assert len(run) == 1 << (count - 1).bit_length()
            assert run[0] % len(run) == 0
            held.append(run)
        else:  # there really is no aligned free run of that length
            size = 1 << (count - 1).bit_length()
            taken = {block for some in held for block in some}
            starts = range(0, num_blocks - size + 1, size)
            assert all(taken & set(range(start, start + size)) for start in starts)
        if victim < len(held):
            for block in held.pop(victim):
                pool.decr_ref(block)
        owners = Counter(block for some in held for block in some)
        assert sum(owners.values()) == len(owners)
        assert pool.num_free == num_blocks - len(owners)
        assert pool.check(owners) == []
    for run in held:
        for block in run:
            pool.decr_ref(block)
    assert pool.check(Counter()) == []
    largest = 1 << (num_blocks.bit_length() - 1)
    assert pool.allocate_run(largest) == list(range(largest))


def run(name, workload, *, num_samples=1, **changed):
    setup, new_cache = baseline_setup(replace(setup_of(**changed), num_samples=num_samples), name)
    simulation = Simulation(setup, new_cache=new_cache)
    result = simulation.run(workload)
    assert all(one.is_complete for one in result.requests)
    assert not simulation.engines[0].scheduler.check()
    assert not simulation.engines[0].scheduler.leaks
    return result


def at_once(count, prompt, output):
    return [Session(0.0, (Turn((Part(key, prompt),), output),)) for key in range(count)]


@pytest.mark.parametrize(
    ("name", "expected"),  # sequences that 128 blocks hold: slabs of 64, 8, and 4 blocks
    [("orca-max", 2), ("orca-pow2", 16), ("orca-oracle", 32), ("static", 2)],
)
def test_the_slab_size_limits_the_number_of_running_sequences(name, expected):
    setup = {"num_blocks": 128, "max_num_seqs": 64, "max_num_batched_tokens": 4096}
    result = run(name, at_once(64, 23, 41), **setup)  # 64 tokens; reserved 1024, 23 + 64, 64
    most = 64 / expected
    assert result.seconds == pytest.approx(most * run(name, at_once(expected, 23, 41), **setup).seconds, rel=0.05)
    assert result.num_preemptions == 0


def test_a_static_batch_waits_for_its_longest_sequence():
    lengths = [4] * 7 + [400]
    workload = [Session(0.0, (Turn((Part(key, 16),), lengths[key % 8]),)) for key in range(32)]
    static, continuous = (
        run(name, workload, num_blocks=512, max_num_seqs=8, max_num_batched_tokens=4096)
        for name in ("static", "orca-max")
    )
    assert static.seconds > 3 * continuous.seconds


def test_every_baseline_runs_a_workload_with_samples_aborts_and_many_lengths():
    workload = make_workload("sharegpt", 10, max_model_len=1024)
    for name in BASELINES:
        run(name, workload, num_samples=2, num_blocks=256)


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_beams_have_slabs_of_their_own_and_copy_what_they_continue(name, steps_in_flight):
    base = setup_of(num_blocks=300, max_num_seqs=24, max_num_batched_tokens=4096, steps_in_flight=steps_in_flight)
    setup, new_cache = baseline_setup(replace(base, beam_width=4), name)
    most = []

    def count(engine):
        cache, by_request = engine.scheduler.cache, Counter(engine.scheduler.cache._requests.values())
        held = [block for table in cache.tables.values() for block in table.blocks[0]]
        assert len(held) == len(set(held))
        assert all(number + len(cache._spare.get(one, ())) == 4 for one, number in by_request.items())
        assert not engine.scheduler.check()
        most.append(len(by_request))

    simulation = Simulation(setup, new_cache=new_cache, on_step=count)
    result = simulation.run(at_once(9, 20, 30))
    assert [(one.reason, one.num_output) for one in result.requests] == [("length", 4 * 30)] * 9
    assert max(most) == {"orca-max": 1, "static": 1, "orca-pow2": 9, "orca-oracle": 9}[name]
    assert simulation.engines[0].scheduler.cache.num_copied_tokens > 0
    assert not simulation.engines[0].scheduler.check()
    assert not simulation.engines[0].scheduler.leaks


def test_an_unknown_baseline_is_refused():
    with pytest.raises(ConfigError, match="did you mean 'orca-max'"):
        baseline_setup(setup_of(), "orcamax")


LIVE = EngineOptions(max_num_seqs=6, memory="64MiB", max_model_len=256, dtype="float32", threads=1)
QUIET = {"report": lambda line: None, "progress": lambda done, total: None}


def live_outputs(engine, requests):
    found = {request.id: {} for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            found[output.request_id].setdefault(output.index, []).extend(output.token_ids)
    return found


def live_baseline(name, length_of, *, num_beams=1):
    """An engine with the embedded model, real kernels and the memory manager of a baseline."""
    prepared = prepare(LIVE, **QUIET)
    cache, scheduler = baseline_configs(prepared.cache, prepared.scheduler_config)
    kernels = prepared.kernels.kernels
    model = prepared.files.load(prepared.dtype, prepared.device, kernels, prepared.schemes, QUIET["progress"], None)
    sizes = {"max_num_seqs": scheduler.max_num_seqs, "max_model_len": scheduler.max_model_len}
    runner = TorchRunner(model, kernels, cache=cache, deterministic_kernels=prepared.kernels.deterministic, **sizes)
    manager = BASELINES[name](cache, length_of, scheduler.max_model_len, num_beams=num_beams)
    description = prepared.files.description
    about = {"vocab_size": description.vocab_size, "eos_token_ids": description.eos_token_ids}
    return Engine(Scheduler(scheduler, manager), runner, **about)


def live_requests(lengths, **more):
    return [
        Request(
            key,
            [3 + (7 * i + int(key)) % 900 for i in range(prompt)],
            SamplingParams(max_tokens=output, temperature=0.0, **more.get("params", {})),
            beams=more.get("beams"),
        )
        for key, (prompt, output) in lengths.items()
    ]


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_runs_live_and_generates_what_paging_generates(name):
    lengths = {str(i): (5 + 9 * i, 20 - i) for i in range(8)}
    requests = live_requests(lengths)
    paged = live_outputs(build(LIVE, **QUIET).engine, requests)
    contiguous = live_baseline(name, lengths.__getitem__)
    assert live_outputs(contiguous, requests) == paged
    assert contiguous.scheduler.check() == []


def test_beams_in_slabs_find_what_beams_in_shared_blocks_find():
    """So each copy into a slab has the KV that it should have."""
    lengths = {str(i): (5 + 9 * i, 24) for i in range(3)}
    beams = plan_beams(BeamSearchParams(beam_width=3, max_tokens=None), vocab_size=2048, num_end_tokens=1)
    requests = live_requests(lengths, params={"n": 3}, beams=beams)
    paged = live_outputs(build(LIVE, **QUIET).engine, requests)
    contiguous = live_baseline("orca-oracle", lengths.__getitem__, num_beams=3)
    assert live_outputs(contiguous, requests) == paged
    assert contiguous.scheduler.cache.num_copied_tokens > 100
    assert contiguous.scheduler.check() == []


def measured(name, workload, **changed):
    meter = KVMeter(every=1)
    setup, new_cache = setup_of(**changed), paged_cache
    if name is not None:
        setup, new_cache = baseline_setup(setup, name)
    Simulation(setup, new_cache=new_cache, on_step=meter).run(workload)
    return meter


def test_the_parts_of_the_memory_are_what_the_slabs_say():
    """Slabs of 48 positions, in runs of 4 blocks, in a pool of 70 blocks: 17 run, and two blocks are free."""
    workload = at_once(4, 8, 40)
    shares = measured("orca-oracle", workload, num_blocks=70, max_model_len=1024, max_num_seqs=1).shares
    assert set(shares) == {0.0}  # rows are short, not memory
    meter = measured("orca-oracle", at_once(40, 8, 40), num_blocks=70, max_num_seqs=64, max_num_batched_tokens=4096)
    assert meter.mean_running == 17  # 17 runs of 4 blocks
    parts = meter.shares
    assert sum(parts[:4]) == pytest.approx(1)
    assert parts.internal == 0
    assert parts.external == pytest.approx((17 * 16 + 2 * 16) / (70 * 16))
    assert parts.live + parts.reservation == pytest.approx(17 * 48 / (70 * 16))


def test_paging_wastes_the_ends_of_last_blocks_only():
    meter = measured(None, at_once(60, 100, 200), num_blocks=200, max_num_seqs=64, max_num_batched_tokens=4096)
    assert meter.shares.live_of_held > 0.93
    assert meter.shares.internal < 0.01
    assert 0.05 < meter.shares.kept_free <= meter.shares.external  # after preemptions, for growth
    contiguous = measured(
        "orca-max", at_once(20, 100, 200), num_blocks=200, max_num_seqs=64, max_num_batched_tokens=4096
    )
    assert contiguous.shares.live < 0.3
    assert contiguous.shares.internal > 0.5
