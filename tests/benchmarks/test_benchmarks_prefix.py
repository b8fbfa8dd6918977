"""benchmarks/prefix at tiny sizes: exact figures are checked, the others only exist."""

import json
import time
from random import Random

import pytest

from benchmarks import scheduling_time
from benchmarks.prefix import __main__ as command
from benchmarks.prefix import plots
from benchmarks.prefix.gain import Outcome, _summary
from benchmarks.prefix.memory import alpaca_lengths, parallel_sampling, saved, shared_prefix, wide_beams
from benchmarks.prefix.micro import Filler, _evictions, _matches
from benchmarks.prefix.reuse import granularity
from benchmarks.prefix.rigs import Embedded, VerbClock, ask, num_held, play, scripted
from benchmarks.prefix.rows import Row, Section
from benchmarks.prefix.sessions import SESSIONS, Session
from benchmarks.workloads import Query


def ours(section: Section) -> dict[str, float]:
    return {row.what: row.ours for row in section.rows}


def quiet(doing: str) -> None:
    assert doing


def test_a_ratio_is_to_the_nearer_end_of_a_range():
    def row(value: float) -> Row:
        return Row("M", "x", "measured", value, "%", (2.0, 4.0))

    assert [row(value).ratio for value in (1.0, 2.0, 3.0, 4.0, 8.0)] == [0.5, 1, 1, 1, 2]
    assert Row("M", "x", "measured", 1.0, "%").ratio is None
    assert row(1.0).expected == "2-4 %" and Row("M", "x", "measured", 1.0, "us", goal=200.0).expected == "< 200 us"


def test_alpaca_lengths_have_the_means_of_the_paper():
    inputs, outputs = zip(*alpaca_lengths(20_000, seed=0), strict=True)
    assert sum(inputs) / 20_000 == pytest.approx(19.3, rel=0.02)
    assert sum(outputs) / 20_000 == pytest.approx(58.4, rel=0.02)
    assert alpaca_lengths(5, seed=0) != alpaca_lengths(5, seed=1)


def test_memory_saved_is_averaged_over_steps():
    assert saved([(10, 5), (4, 3), (0, 0)]) == pytest.approx(37.5)


@pytest.mark.parametrize("n", [2, 5])
def test_samples_of_one_prompt_hold_its_whole_blocks_once(n):
    rig = scripted("none", num_blocks=200, max_model_len=200)
    rig.scheduler.watching = True
    ask(rig.engine, [Query(list(range(40)), 3)], n=n)
    assert max(rig.scheduler.held) == (3 * n, 2 + n), "2 of 3 blocks are shared"


def test_prefix_sharing_of_parallel_samples_saves_more_with_larger_n():
    percents = list(parallel_sampling(quiet, quick=True).data["saved_percent"].values())
    assert 0 < percents[0] < percents[1] < percents[2] < 100


def test_100_requests_with_one_prefix():
    found = ours(shared_prefix(quiet, quick=True))
    assert found["prefix blocks of a copy"] == 63
    assert found["prefix blocks saved, before anybody writes"] == pytest.approx(99)
    assert found["prefix blocks saved, requests going on differently, radix"] == pytest.approx(100 * (1 - 162 / 6300))
    assert found["prefix tokens not computed, radix"] == pytest.approx(99)
    assert found["prefix tokens not computed, hash"] == pytest.approx(99 * 992 / 1000)


def test_wide_beams_give_the_documents_worked_examples_and_its_memory_without_sharing():
    found = {row.what: row.ratio for row in wide_beams(quiet, quick=True).rows}
    assert found.pop("memory of 4 beams, copy-on-write", None) is None, "the prompt's length was derived from it"
    exact = [ratio for what, ratio in found.items() if "copy-on-write" not in what and ratio is not None]
    assert exact == pytest.approx([1] * 5, rel=2e-3)


def test_the_tree_reuses_to_the_token_and_hashes_to_the_block():
    data = granularity(quiet, quick=True).data
    assert data["radix"] == data["shared"] == list(range(1, 65))
    assert data["hash"] == [length // 16 * 16 for length in data["shared"]]
    assert set(data["none"]) == {0}


@pytest.mark.parametrize("name", SESSIONS)
def test_sessions_are_the_same_work_with_every_index_and_fit_the_model(name):
    asked: dict[str, list[tuple[int, int]]] = {}
    hits = {}
    for index in ("none", "hash", "radix"):
        rig, rng, asked[index] = scripted(index, num_blocks=6000), Random(0), []

        def watched(session: Session, lengths: list[tuple[int, int]]) -> Session:
            queries = next(session)
            while True:
                lengths += [(len(query.prompt), query.num_output_tokens) for query in queries]
                outputs = yield queries
                try:
                    queries = session.send(outputs)
                except StopIteration:
                    return

        sessions = SESSIONS[name](lambda n, rng=rng: [rng.randrange(1000) for _ in range(n)], 1)
        play(rig.engine, [watched(session, asked[index]) for session in sessions])
        hits[index] = rig.engine.stats().prefix_hit_tokens
        assert rig.engine.stats().prefix_query_tokens == sum(num_prompt for num_prompt, _ in asked[index])
    assert sorted(asked["none"]) == sorted(asked["hash"]) == sorted(asked["radix"])
    assert max(map(sum, asked["none"])) <= 2048
    assert 0 == hits["none"] < hits["hash"] <= hits["radix"]


def test_a_gain_is_the_median_of_the_rounds_ratios():
    summary = _summary({"none": Outcome([4.0, 9.0, 2.0], 100, 0), "radix": Outcome([2.0, 3.0, 2.0], 100, 60)})
    assert summary["radix"]["gain"] == 2 and summary["none"]["gain"] == 1
    assert summary["radix"]["hit_rate"] == 60 and summary["radix"]["computed"] == 40


class Nested:
    def inner(self) -> int:
        return sum(range(300_000))

    def outer(self) -> int:
        return self.inner()


def test_a_verb_clock_counts_verbs_within_verbs_once():
    nested = Nested()
    clock = VerbClock(nested, ("inner", "outer"))
    start = time.perf_counter()
    nested.outer()
    elapsed = time.perf_counter() - start
    assert 0 < clock.seconds < elapsed


def test_sequences_that_were_put_or_planted_stay_cached():
    filler = Filler("radix", 100)
    filler.plant(list(range(40)))
    assert (num_held(filler.cache), filler.cache.pools.num_idle) == ((0, 0), 3)
    filler.put(list(range(40)))
    assert filler.cache.pools.num_idle == 3 and filler.cache.check() == []


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_micro_measures_what_it_says(index):
    tries = _matches(index, 20, 3)
    assert all(0 < own < admit + record for some in tries.values() for own, admit, record in some)
    assert len(list(_evictions(index, 10, 20))) == 20  # asserts that each eviction frees one block


@pytest.mark.parametrize("index", ["radix", "hash", "none"])
def test_scheduling_is_timed_with_others_waiting(index):
    parts = scheduling_time.decoding(8, 20, num_waiting=5, prefix_index=index)
    assert {len(seconds) for seconds in parts.values()} == {20}


def test_the_command_writes_its_figures(tmp_path, capsys):
    file = tmp_path / "prefix.json"
    command.main(["--only", "granularity", "wide-beams", "--quick", "--json", str(file)])
    written = json.loads(file.read_text())
    assert {row["id"] for row in written["rows"]} == {"R5", "M17"}
    assert written["quick"] is True and written["data"]["granularity"]["radix"][16] == 17
    assert "17 tokens" in capsys.readouterr().out


def test_without_matplotlib_there_is_no_picture_and_the_command_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plots, "Figure", None)
    command.main(["--only", "granularity", "--quick", "--plots", str(tmp_path)])
    assert ".[plots]" in capsys.readouterr().out and not list(tmp_path.iterdir())


@pytest.mark.skipif(plots.Figure is None, reason="matplotlib is optional")
def test_a_picture_is_drawn(tmp_path):
    curve = {2: 40.0, 4: 45.0, 6: 50.0}
    one = {"gain": 2.0, "hit_rate": 80.0}
    figures = {
        "sampling": {"saved_percent": curve},
        "beams": {"simulated_percent": curve, "measured_percent": curve},
        "granularity": granularity(quiet, quick=True).data,
        "gain": {"agents": {"hash": one, "radix": one}},
    }
    path = plots.draw(figures, tmp_path)
    assert path is not None and path.read_bytes().startswith(b"\x89PNG")


def test_the_embedded_model_runs_under_each_index():
    embedded = Embedded()
    query = Query(list(range(5, 45)), 4)
    for index in ("none", "hash", "radix"):
        engine = embedded.rig(index).engine
        assert ask(engine, [query]) == [0]
        assert ask(engine, [query]) == [{"none": 0, "hash": 32, "radix": 39}[index]]


def test_scheduling_time_beside_another_version(tmp_path, capsys, monkeypatch):
    path = tmp_path / "figures.json"
    arguments = ["--sequences", "8", "--steps", "20", "--before", str(scheduling_time.ROOT), "--pairs", "2"]
    monkeypatch.setattr("sys.argv", ["scheduling_time", *arguments, "--json", str(path)])
    scheduling_time.main()
    report = json.loads(path.read_text())
    assert set(report["ratio_to_before"]) == set(report["cpu_time"])
    assert report["ratio_to_before"]["churn, plan+commit"]["pairs"] == 2
    assert "of the time before" in capsys.readouterr().out


def test_the_interval_of_a_median_is_that_of_the_sign_test():
    assert scheduling_time.interval([float(i) for i in range(15)]) == (3.0, 11.0)  # 0.9648, from the binomial
    assert scheduling_time.interval([2.0, 1.0]) == (1.0, 2.0)
