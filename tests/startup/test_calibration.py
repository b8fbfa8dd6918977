"""Calibration runs steps without lasting effects: on the scripted runner, and on the embedded model."""

import io
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hybrid_shape import state_group
from kv_groups import kv_group
from msgspec import UNSET, structs
from typer.testing import CliRunner

from quire import LLM, SamplingParams
from quire.cache.kv_cache import KVCache
from quire.cli import app
from quire.config import CacheConfig, EngineOptions, SchedulerConfig
from quire.core.request import Request
from quire.core.step import StepResult
from quire.cost.step_time import Calibration, CostModel, DecodeSample
from quire.engine.engine import Engine
from quire.errors import ConfigError
from quire.kernels.cpu import EXTENSION
from quire.runner.model_runner import TorchRunner
from quire.runner.scripted_runner import ScriptedRunner, script
from quire.scheduler import journal
from quire.scheduler.journal import JournalledScheduler
from quire.server import serve
from quire.startup.build import build
from quire.startup.calibration import decode_ratio, measure

VOCAB = 50
SMALL = {"dtype": "float32", "memory": "300MiB", "max_num_seqs": 4}


class Timed:
    """The scripted runner with a clock that its steps advance. Moves are only timed.

    slowness(n): factor of the duration of the nth step.
    """

    capabilities = ScriptedRunner.capabilities

    def __init__(self, cache, limits, *, fails=lambda step: False, slowness=lambda n: 1):
        self.now = 0.0
        self.steps = []
        self._fails = fails
        self._slowness = slowness
        self._moved = None
        self._runner = ScriptedRunner(
            replace(cache, states=None),  # whose states are not those of a sequence
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            vocab_size=VOCAB,
            seconds_of=lambda n: 1e-3 + 1e-5 * n,
        )

    def clock(self):
        return self.now

    def launch(self, step):
        self.steps.append(step)
        if self._fails(step):
            raise RuntimeError("out of memory")
        self._moved = step if step.moves else None
        if self._moved is None:
            self._runner.launch(step)

    def release_workspace(self):
        self._runner.release_workspace()

    def sample(self, step_id, late, processors=()):
        if self._moved is None:
            self._runner.sample(step_id, late)

    def collect(self):
        if self._moved is None:
            result = self._runner.collect()
            result = structs.replace(result, seconds=result.seconds * self._slowness(len(self.steps)))
            self.now += result.seconds
            return result
        num_blocks = sum(len(move.pairs) for move in self._moved.moves)
        out = self._moved.moves[0].target == "host"
        seconds = (num_blocks * 1e-4, 0.0) if out else (0.0, num_blocks * 2e-4)
        self.now += sum(seconds)
        nothing = np.zeros(0, np.int32)
        return StepResult(self._moved.id, 0.0, nothing, nothing, swap_seconds=seconds)


def configs(num_blocks=64, *, host=0, window=0, max_model_len=200, max_num_seqs=20, budget=100):
    groups = [kv_group((0,), 1, 8, "float32", num_blocks, 256, num_host_blocks=host)]
    if window:
        groups.append(kv_group((1,), 1, 8, "float32", num_blocks, 256, window=window, num_host_blocks=host))
    limits = SchedulerConfig(max_num_seqs, budget, max_model_len, 0.5, 0.01, 1)
    return CacheConfig(4, tuple(groups), "radix"), limits


def measured(cache, limits, *, seconds=10.0, **runner):
    timed = Timed(cache, limits, **runner)
    return timed, measure(timed, cache, limits, vocab_size=VOCAB, seconds=seconds, clock=timed.clock)


@pytest.mark.parametrize("window", [0, 40])
def test_prompts_steps_and_copies_are_measured(window):
    _, (found, _, problem) = measured(*configs(host=16, window=window, budget=150))
    assert problem == ""
    sizes = {sample.num_tokens for sample in found.prefill}
    assert sizes >= {8, 32, 128, 150}
    assert {sample.num_before for sample in found.prefill} - {0}
    assert {sample.num_rows for sample in found.decode} == {1, 4, 16}
    assert len({sample.num_bytes for sample in found.copies}) == 2
    costs = CostModel()
    costs.calibrate(found)
    assert costs.recompute_seconds(100) == pytest.approx(1e-3, rel=0.01)
    assert costs.copy_seconds(256) == (pytest.approx(1e-4), pytest.approx(2e-4))
    assert max(sample.num_tokens + sample.num_before for sample in found.prefill) < 200


def test_calibration_ends_within_its_time_limit():
    cache, limits = configs()
    for seconds in (1e-6, 2e-3, 0.01, 0.1):
        timed, (found, _, problem) = measured(cache, limits, seconds=seconds)
        assert problem == ""
        assert timed.now <= seconds + 10e-3  # a step takes 1 to 2 ms; each part begins with up to four
        assert len({sample.num_tokens for sample in found.prefill}) > 1, "one length says nothing about the others"
        assert found.decode, "the target for the time between tokens needs a decode step"
    assert found.prefill


def test_ids_are_below_zero_and_each_shape_is_warm_when_it_counts():
    timed, _ = measured(*configs(host=8))
    assert all(step.id < 0 for step in timed.steps)
    assert len({step.id for step in timed.steps}) == len(timed.steps)
    assert all((step.chunks.seq_ids < 0).all() for step in timed.steps)
    assert all(move.id < 0 for step in timed.steps for move in step.moves)
    behind_nothing = [step.num_tokens for step in timed.steps if list(step.chunks.starts) == [0]]
    assert sorted(behind_nothing)[:7] == [8, 8, 8, 32, 32, 100, 100]


def test_runs_that_disagree_are_repeated_and_the_fastest_counts():
    quiet, (expected, spread, _) = measured(*configs())
    assert spread == pytest.approx(0)
    chance = Random(3)
    noisy, result = measured(*configs(), slowness=lambda _n: chance.choice((1, 1, chance.uniform(2, 9))))
    assert len(noisy.steps) > len(quiet.steps)
    costs, noisy_costs = CostModel(), CostModel()
    costs.calibrate(expected)
    noisy_costs.calibrate(result.calibration)
    assert noisy_costs.prefill.per_token == pytest.approx(costs.prefill.per_token, rel=0.1)
    assert noisy_costs.decode_step_seconds == pytest.approx(costs.decode_step_seconds, rel=0.1)


def test_a_calibration_without_agreement_ends_and_says_so():
    growing, result = measured(*configs(), seconds=0.05, slowness=lambda n: 1.3**n)
    assert growing.now <= 4 * 0.05 + 0.1
    assert result.spread == pytest.approx(0.3, abs=0.05)
    assert "runs of one step differ by 3" in result.quality
    assert "the first requests correct the costs" in result.quality


@pytest.mark.parametrize("limits", [{"max_model_len": 2, "max_num_seqs": 1}, {"max_num_seqs": 1, "budget": 3}])
def test_tiny_engines_are_measured_as_far_as_they_go(limits):
    _, (found, _, problem) = measured(*configs(**limits))
    assert problem == ""
    assert found.prefill


def test_a_runner_that_fails_ends_only_the_part_that_it_failed_in(caplog):
    _, (found, _, problem) = measured(*configs(host=8), fails=lambda step: step.num_tokens > 20)
    assert problem == "prompts could not be measured (RuntimeError: out of memory)"
    assert found.decode
    assert found.copies
    _, (nothing, _, problem) = measured(*configs(host=8), fails=lambda step: True)
    assert (nothing.prefill, nothing.decode, nothing.copies) == ([], [], [])
    assert "out of memory" in problem
    assert "the calibration of copies failed" in caplog.text


def test_requests_after_it_are_as_if_it_had_not_been():
    cache, limits = configs(host=8)
    timed, (found, *_) = measured(cache, limits)
    file = io.BytesIO()
    scheduler = JournalledScheduler(limits, KVCache(cache), file)
    scheduler.calibrate(found)
    engine = Engine(scheduler, timed, vocab_size=VOCAB, clock=timed.clock)
    prompt = list(range(30))
    engine.add(Request("a", prompt, SamplingParams(temperature=0.0, max_tokens=20)))
    tokens = [token for output in run(engine) for token in output.token_ids]
    assert tokens == script(prompt, 20, VOCAB)
    stats = engine.stats()
    assert (stats.failed_steps, stats.prompt_tokens, stats.generation_tokens) == (0, 30, 20)
    assert stats.prefix_hit_tokens == 0
    file.seek(0)
    records = list(journal.read_records(file))
    assert [type(record).__name__ for record in records[:3]] == ["Header", "Calibrate", "Add"]
    assert sum(isinstance(record, journal.Calibrate) for record in records) == 1
    assert journal.replay(iter(records)).difference == ""


def test_steps_of_a_model_with_states_have_a_block_for_each_row_and_apply_all_tokens():
    cache, limits = configs(host=16, budget=150)
    timed, (found, _, problem) = measured(replace(cache, states=state_group(24, 2)), limits)
    assert problem == ""
    for step in timed.steps:
        chunks, states = step.chunks, step.states
        assert states.blocks.tolist() == chunks.rows.tolist()
        assert states.settled.tolist() == chunks.starts.tolist()
        assert states.settles.tolist() == chunks.stops.tolist()
        assert not len(states.snapshot_blocks)
    assert max(len(step.states.blocks) for step in timed.steps) == 16
    copies = [step.moves for step in timed.steps if step.moves]
    assert {len(moves[-1].pairs) for moves in copies} == {1, 2}
    assert {tuple(move.group for move in moves) for moves in copies} == {(0, 1)}
    most = 16 * 256 + 2 * state_group().bytes_per_block
    assert max(sample.num_bytes for sample in found.copies) == most
    timed, _ = measured(cache, limits)
    assert all(step.states is UNSET for step in timed.steps)


def run(engine):
    while engine.has_work:
        yield from engine.step()


# The embedded model


def test_the_embedded_model_answers_the_same_and_its_journal_replays(tmp_path):
    params = SamplingParams(temperature=0.0, max_tokens=12)
    answers = []
    for seconds in (0, 5.0):
        path = tmp_path / f"{seconds}"
        lines = []
        llm = LLM(**SMALL, journal=str(path), calibration=float(seconds), report=lines.append)
        stats = llm.get_metrics()
        assert (stats.num_steps, stats.prompt_tokens, stats.kv_blocks_cached, stats.kv_blocks_used) == (0, 0, 0, 0)
        answers.append(
            [result.outputs[0].token_ids for result in llm.generate(["One Tuesday Mira", "The lamp"], params)]
        )
        llm.close()
        assert journal.replay_journal(path).difference == ""
        assert any(line.startswith("costs ") for line in lines) == bool(seconds)
    assert answers[0] == answers[1]
    assert "a token" in next(line for line in lines if line.startswith("costs "))


def test_copies_to_the_host_are_measured_and_leave_nothing_there():
    lines = []
    llm = LLM(**SMALL, swap_space=0.02, calibration=10.0, report=lines.append)
    assert "GB/s from it" in next(line for line in lines if line.startswith("costs "))
    stats = llm.get_metrics()
    assert stats.host_blocks_total > 0
    assert (stats.host_blocks_used, stats.num_swapped_out_blocks, stats.num_swapped_in_blocks) == (0, 0, 0)
    plain = LLM(**SMALL)
    params = SamplingParams(temperature=0.0, max_tokens=12)
    assert llm.generate("Mira", params)[0].outputs[0].text == plain.generate("Mira", params)[0].outputs[0].text


def test_a_failed_calibration_is_reported_and_requests_are_served(monkeypatch):
    serve = TorchRunner.launch

    def failing(self, step):
        if step.id < 0:
            raise RuntimeError("a kernel")
        serve(self, step)

    monkeypatch.setattr(TorchRunner, "launch", failing)
    lines = []
    llm = LLM(**SMALL, calibration=0.2, report=lines.append)
    (line,) = [line for line in lines if line.startswith("costs ")]
    assert "not measured yet; prompts could not be measured (RuntimeError: a kernel)" in line
    assert llm.generate("Mira", SamplingParams(max_tokens=2))[0].finished


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"calibration": 0.2}, "target 50 ms between tokens while prompts are computed; --target-tpot-ms sets"),
        ({"calibration": 0.2, "target_tpot_ms": 0.1}, "steps can take longer, because a decode step alone takes"),
        ({"target_tpot_ms": 80.0}, "target 80 ms between tokens while prompts are computed"),
    ],
)
def test_the_target_between_tokens_is_reported(options, words):
    lines = []
    LLM(**SMALL, **options, report=lines.append).close()
    (line,) = [line for line in lines if line.startswith("tpot ")]
    assert words in line


def test_a_server_calibrates_by_default():
    assert serve.with_server_defaults(EngineOptions()).calibration == serve.CALIBRATION_SECONDS > 0
    assert serve.with_server_defaults(EngineOptions(calibration=0.0)).calibration == 0.0


def ratio_to(known=None, **runner):
    cache, limits = configs()
    timed = Timed(cache, limits, **runner)
    if known is None:
        known = measure(Timed(cache, limits), cache, limits, vocab_size=VOCAB, seconds=1, clock=timed.clock).calibration
    return decode_ratio(timed, cache, limits, known, vocab_size=VOCAB, clock=timed.clock), timed.steps


def test_ratio_is_that_of_a_decode_step_of_one_sequence():
    found, steps = ratio_to()
    assert found == pytest.approx(1)
    assert len(steps) == 4  # new rows, their prompts, two decode steps
    assert ratio_to(slowness=lambda n: 3)[0] == pytest.approx(3)


def test_ratio_is_infinite_without_a_measurement():
    assert ratio_to(Calibration())[0] == float("inf")
    assert ratio_to(Calibration(decode=[DecodeSample(1, 0.0)]))[0] == float("inf")
    assert ratio_to(fails=lambda step: True)[0] == float("inf")


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "lpm", "enable_prefix_caching": False}, "policy 'lpm' orders requests by their prefix match"),
        ({"policy": "cache-aware", "enable_prefix_caching": False}, "policy 'cache-aware' orders"),
        ({"policy": "fifo"}, "policy: Invalid enum value 'fifo'"),
        ({"policy": "dfs-weight"}, "policy: 'dfs-weight' is not supported; use lpm"),
        ({"wait_weight": 3.0}, "wait_weight applies to policy 'cache-aware'; policy 'fcfs'"),
        ({"wait_weight": -1.0, "policy": "cache-aware"}, "wait_weight must be at least 0"),
        ({"eviction": "cost", "prefix_index": "hash"}, "eviction 'cost' needs the radix prefix index; use the radix"),
        ({"eviction": "lfu", "enable_prefix_caching": False}, "do not turn off enable_prefix_caching"),
        ({"eviction": "fifo"}, "eviction: Invalid enum value 'fifo'"),
        ({"preemption": "swap", "device": "cpu"}, "preemption 'swap' needs a host pool; give swap_space"),
        ({"preemption": "swap", "swap_space": "0"}, "preemption 'swap' needs a host pool"),
        ({"preemption": "recompute", "swap_space": "1GiB"}, "swap_space=1GiB has no effect"),
        ({"swap_space": "lots"}, "swap_space must be bytes"),
        ({"swap_space": "4000"}, "of host memory available"),
        ({"calibration": -1.0}, "calibration must be 0 to 600 seconds"),
        ({"calibration": float("nan")}, "calibration must be 0 to 600 seconds"),
    ],
)
def test_options_that_do_not_go_together_say_what_to_change(options, message):
    with pytest.raises(ConfigError, match=message):
        build(EngineOptions(**options), report=lambda line: None, progress=lambda done, total: None)


def test_options_reach_the_scheduler_and_the_memory_plan():
    lines = []
    options = EngineOptions(**SMALL, policy="cache-aware", wait_weight=7.0, swap_space="0.01", eviction="lru")
    built = build(options, report=lines.append, progress=lambda done, total: None)
    (group,) = built.cache.groups
    host = group.num_host_blocks * group.bytes_per_block
    assert 0.01 * 2**30 - group.bytes_per_block < host <= 0.01 * 2**30
    (line,) = [line for line in lines if line.startswith("host pool")]
    assert f"{group.num_host_blocks} blocks of 16 tokens in host memory" in line
    assert (built.options.wait_weight, built.options.swap_space, built.options.calibration) == (7.0, f"{host}B", 0.0)
    built.engine.close()


def test_swap_space_is_taken_as_a_number_by_the_offline_interface():
    llm = LLM(**SMALL, swap_space=0.01)
    assert llm.get_metrics().kv_blocks_total > 0


# The doctor's block sizes


def block_size_lines(*arguments):
    result = CliRunner().invoke(app, ["doctor", "--memory", "300MiB", *arguments])
    assert result.exit_code == ("8" in arguments)  # refused further down
    return result.output.partition("block size\n")[2].partition("precision\n")[0].splitlines()


@pytest.mark.skipif(EXTENSION is not None, reason="the C++ kernels are not built")
@pytest.mark.parametrize(
    ("block_size", "advice"),
    [
        ("8", "8 is used; 16 is recommended, because the faster cpu kernels run with it"),
        ("16", "16 is used; no other size with these kernels leaves clearly fewer slots empty"),
        ("128", "128 is used; 16 leaves fewer slots empty with the same kernels"),
    ],
)
def test_the_doctor_recommends_a_block_size_that_the_fast_kernels_support(block_size, advice):
    *sizes, last = block_size_lines("--block-size", block_size)
    assert [line.partition(";")[0].strip() for line in sizes] == [
        "8: reference kernels",
        *(f"{size}: cpu kernels" for size in (16, 32, 64, 128)),
    ]
    assert sizes[1].endswith("sequences of 512 tokens leave 1.4% of their slots empty")
    assert last.strip() == advice


@pytest.mark.skipif(EXTENSION is not None, reason="the C++ kernels are not built")
def test_the_doctor_gives_the_reason_of_a_block_size_that_the_named_kernels_refuse():
    sizes = block_size_lines("--kernels", "cpu")
    assert sizes[0].strip() == "8: not with cpu kernels, --block-size 8 is not a multiple of 16"
