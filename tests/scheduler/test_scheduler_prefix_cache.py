"""The scheduler with a prefix index: what is computed once, the reported figures, and unchanged outputs."""

import random

import numpy as np
import pytest
from scripted_adapters import new_adapter
from scripted_engine import VOCAB, Rig

from quire.core.request import Beams, Namespace
from quire.core.step import Step
from quire.errors import RequestError
from quire.runner.scripted_runner import attend, key_after, logprobs_after, script
from quire.scheduler import request_stats
from quire.scheduler.beam_search import Rules, Search

BOTH = pytest.mark.parametrize("steps_in_flight", [1, 2])
INDEXES = pytest.mark.parametrize("prefix_index", ["radix", "hash"])


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def computed(rig: Rig) -> int:
    """Tokens computed by all steps so far."""
    return sum(rig.scheduler.sizes)


@INDEXES
@BOTH
def test_requests_that_arrive_together_compute_a_common_prefix_once(prefix_index, steps_in_flight):
    rig = Rig(prefix_index=prefix_index, max_num_batched_tokens=64, steps_in_flight=steps_in_flight)
    for i in range(4):
        rig.add(str(i), prompt(16) + prompt(3, seed=i + 1), max_tokens=1)
    rig.step()
    assert rig.scheduler.sizes == [16 + 4 * 3]
    rig.run()
    for i in range(4):
        assert rig.tokens[str(i), 0] == script(prompt(16) + prompt(3, seed=i + 1), 1, VOCAB)
    assert [rig.cached[str(i), 0] for i in range(4)] == [0, 16, 16, 16]


@BOTH
def test_a_prefix_is_shared_as_soon_as_its_step_is_launched(steps_in_flight):
    rig = Rig(prefix_index="radix", max_num_batched_tokens=8, steps_in_flight=steps_in_flight)
    rig.add("first", prompt(30), max_tokens=20)
    for _ in range(5):
        rig.step()
    rig.add("second", prompt(30)[:27], max_tokens=4)
    rig.run()
    assert rig.cached["second", 0] == 26, "to the token, but for the last one of the prompt"
    assert rig.tokens["second", 0] == script(prompt(30)[:27], 4, VOCAB)


@BOTH
def test_a_turn_of_a_chat_finds_all_turns_before_it(steps_in_flight):
    rig = Rig(prefix_index="radix", block_size=16, num_blocks=64, max_model_len=500, steps_in_flight=steps_in_flight)
    chat: list[int] = []
    for turn in range(6):
        chat += prompt(9, seed=turn)
        rig.add(str(turn), list(chat), max_tokens=7)
        rig.run()
        # all except the new turn; the KV of the answer's last token was never computed
        assert rig.cached[str(turn), 0] == max(0, len(chat) - 9 - 1)
        chat += rig.tokens[str(turn), 0]
        assert rig.tokens[str(turn), 0] == script(chat[:-7], 7, VOCAB)


def test_a_preempted_sequence_computes_again_only_what_was_evicted():
    rig = Rig(num_blocks=16, prefix_index="radix", watermark=0.0)
    for i in range(3):
        rig.add(str(i), prompt(20, i), max_tokens=20)
    rig.run()
    assert rig.scheduler.request_stats.num_preemptions
    lost = [one for i in range(3) for one in rig.engine.explain(str(i)).preemptions]
    assert sum(one.num_recomputed_tokens for one in lost) < sum(one.num_lost_tokens for one in lost)
    for i in range(3):
        assert rig.tokens[str(i), 0] == script(prompt(20, i), 20, VOCAB)


@BOTH
@INDEXES
def test_blocks_with_the_same_tokens_are_kept_once_also_while_they_are_generated(prefix_index, steps_in_flight):
    rig = Rig(prefix_index=prefix_index, max_num_batched_tokens=64, steps_in_flight=steps_in_flight)
    for i in range(3):
        rig.add(str(i), prompt(6), max_tokens=30)
    for _ in range(24):
        rig.step()
    tables = [table.blocks[0] for table in rig.cache.tables.values()]
    assert len(tables) == 3
    assert {tuple(blocks[:6]) for blocks in tables} == {tuple(tables[0][:6])}
    rig.run()
    assert len({tuple(rig.tokens[str(i), 0]) for i in range(3)}) == 1


def test_a_request_for_prompt_logprobs_computes_a_cached_prompt_again():
    rig = Rig(prefix_index="radix")
    rig.add("a", prompt(20), max_tokens=2)
    rig.run()
    rig.add("b", prompt(20), max_tokens=2, prompt_logprobs=0)
    rig.run()
    assert rig.cached["b", 0] == 0 and [position for _, position in rig.scored["b"]] == list(range(1, 20))
    assert rig.engine.explain("b").miss.reason == "recomputed"
    assert rig.cache.pools.num_idle <= 6, "its own blocks were exchanged for those that were there"


@BOTH
def test_a_step_that_fails_takes_with_it_what_was_shared_of_it(steps_in_flight):
    def fails(step: Step) -> bool:
        return len(step.chunks) > 1 and step.id % 2 == 1

    rig = Rig(prefix_index="radix", max_num_batched_tokens=16, steps_in_flight=steps_in_flight, fails=fails)
    common = prompt(22)
    for i in range(5):
        rig.add(str(i), common + prompt(3, seed=i + 1), max_tokens=6)
        rig.step()
    rig.run()
    for i in range(5):
        assert rig.tokens[str(i), 0] == script(common + prompt(3, seed=i + 1), 6, VOCAB)


@BOTH
@pytest.mark.parametrize("windows", [(0,), (6,), (6, 0)])
def test_the_culprit_is_found_among_those_who_share(windows, steps_in_flight):
    def fails(step: Step) -> bool:
        return any(chunk.seq_id == 3 and chunk.stop > 20 for chunk in step.chunks)

    options = {"max_num_batched_tokens": 64, "max_model_len": 64, "steps_in_flight": steps_in_flight}
    rig = Rig(prefix_index="radix", windows=windows, fails=fails, **options)
    rig.add("earlier", prompt(20) + prompt(9, seed=9), max_tokens=1)
    rig.run()
    for i in range(5):
        rig.add(str(i), prompt(20) + prompt(3, seed=i + 1), max_tokens=6)
    rig.run()
    assert {key[0]: reason for key, reason in rig.reasons.items()} == {
        "earlier": "length",
        "0": "length",
        "1": "length",
        "2": "error",
        "3": "length",
        "4": "length",
    }


@INDEXES
@BOTH
def test_tokens_equal_those_of_a_lone_run_through_failures_and_preemptions(prefix_index, steps_in_flight):
    """Small pools, failures, aborts, stops, n, namespaces: outputs equal the script, and `check` finds no error."""
    rng = random.Random(7 + steps_in_flight)
    poison: set[str] = set()

    def fails(step: Step) -> bool:
        return rng.random() < 0.03

    options = {"max_num_batched_tokens": 24, "watermark": 0.01, "steps_in_flight": steps_in_flight}
    rig = Rig(num_blocks=40, prefix_index=prefix_index, fails=fails, seed=5, max_model_len=120, **options)
    stems = [prompt(rng.randrange(3, 40), seed=i) for i in range(6)]
    asked: dict[str, list[int]] = {}
    for number in range(260):
        if rng.random() < 0.7:
            name = str(number)
            done = [rig.tokens[key] for key in rig.reasons if key[0] in asked and key[1] == 0]
            stem = rng.choice(stems)
            if done and rng.random() < 0.3:
                past = rng.choice([key for key in rig.reasons if key[0] in asked])
                stem = asked[past[0]] + rig.tokens[past]
            tokens = stem[: rng.randrange(1, 60)] + prompt(rng.randrange(0, 6), seed=number)
            asked[name] = tokens
            space = Namespace(tenant=rng.choice(["a", "b"]))
            rig.add(name, tokens, max_tokens=rng.randrange(1, 30), n=rng.choice([1, 1, 1, 3]), namespace=space)
        for _ in range(rng.randrange(6)):
            rig.step()
        if rng.random() < 0.05:
            poison.add(str(rng.randrange(number + 1)))
            rig.abort(max(poison))
        if rng.random() < 0.02:
            rig.engine.flush_cache()
            assert rig.scheduler.check() == []
    rig.run()
    assert rig.scheduler.request_stats.num_preemptions
    for (name, index), tokens in rig.tokens.items():
        expected = script(asked[name], len(tokens), VOCAB)
        assert tokens == expected, (name, index)
    stats = rig.engine.stats()
    assert stats.prefix_hit_tokens and stats.kv_blocks_evicted
    assert stats.kv_tokens_copied
    assert rig.replay().difference == ""
    rig.engine.flush_cache()
    assert rig.cache.pools.num_free == rig.cache.pools.num_blocks


@BOTH
@pytest.mark.parametrize("windows", [(6,), (0, 6), (9, 0, 6)])
def test_windows_and_prefixes(windows, steps_in_flight):
    rng = random.Random(3)
    rig = Rig(num_blocks=30, prefix_index="radix", windows=windows, max_model_len=100, steps_in_flight=steps_in_flight)
    stem, asked = prompt(40), {}
    for i in range(60):
        asked[str(i)] = stem[: rng.randrange(5, 40)] + prompt(rng.randrange(1, 9), seed=i)
        rig.add(str(i), asked[str(i)], max_tokens=rng.randrange(1, 20))
        for _ in range(rng.randrange(5)):
            rig.step()
    rig.run()
    for name, tokens in asked.items():
        assert rig.tokens[name, 0] == script(tokens, len(rig.tokens[name, 0]), VOCAB, windows)
    assert rig.engine.stats().prefix_hit_tokens > 100


# Tenants


@BOTH
def test_the_steps_of_one_tenant_do_not_tell_what_another_has_cached(steps_in_flight):
    def steps(*, cached: bool) -> list[list[tuple[int, int, int]]]:
        rig = Rig(prefix_index="radix", num_blocks=200, max_model_len=200, steps_in_flight=steps_in_flight)
        rig.add("a", prompt(50, seed=0 if cached else 1), namespace=Namespace(tenant="a"))
        rig.run()
        first = len(rig.scheduler.sizes)
        for i in range(3):
            rig.add(f"b{i}", [*prompt(50), i], namespace=Namespace(tenant="b"))
            rig.run()
        assert rig.cached["b0", 0] == 0 and rig.cached["b1", 0] == 50
        return rig.scheduler.sizes[first:]

    assert steps(cached=True) == steps(cached=False)


def test_a_salt_narrows_and_deterministic_requests_share_among_themselves():
    rig = Rig(prefix_index="radix", num_blocks=200, max_model_len=200)
    spaces = {"plain": Namespace("t"), "salted": Namespace("t", "s")}
    for name, space in spaces.items():
        for i in range(2):
            rig.add(f"{name}{i}", prompt(30), namespace=space)
            rig.run()
        assert (rig.cached[f"{name}0", 0], rig.cached[f"{name}1", 0]) == (0, 29)
    reasons = {name: rig.engine.explain(f"{name}0").miss.reason for name in spaces}
    assert reasons == {"plain": "never_seen", "salted": "other_salt"}


def test_an_adapter_is_refused_without_room_for_adapters():
    with pytest.raises(RequestError, match="start it with --enable-lora"):
        Rig().add("a", [1], adapter=new_adapter("pirate"))


# Reported figures


def test_an_explanation_says_what_became_of_a_request():
    rig = Rig(num_blocks=12, prefix_index="radix", watermark=0.0, max_num_seqs=2, max_model_len=40)
    rig.add("a", prompt(17), max_tokens=8)
    rig.run()
    rig.add("b", prompt(17)[:14] + prompt(5, seed=2), max_tokens=8, n=2)
    rig.run()
    explanation = rig.engine.explain("b")
    assert (explanation.num_cached_tokens, explanation.num_shared_blocks, explanation.num_copied_tokens) == (14, 3, 2)
    assert (explanation.miss.position, explanation.miss.token, explanation.miss.reason) == (
        14,
        prompt(5, seed=2)[0],
        "never_seen",
    )
    assert explanation.state == "finished" and explanation.arrived < explanation.admitted < explanation.finished
    assert explanation.waited["prompt"] > 0
    assert 0 < explanation.num_blocks_own < explanation.num_blocks_unshared and 0 < explanation.saved < 1
    for i in range(3):
        rig.add(f"c{i}", prompt(30, seed=5 + i), max_tokens=8)
    rig.run()
    waited = rig.engine.explain("c2").waited
    assert waited.get("memory", 0) + waited.get("rows", 0) > 0
    assert rig.engine.stats().kv_blocks_evicted
    rig.add("again", prompt(17), max_tokens=8)
    rig.run()
    miss = rig.engine.explain("again").miss
    assert miss.reason == "evicted" and miss.evicted_for.startswith("c") and miss.evicted_at > 0
    assert rig.engine.explain("unknown") is None


def test_explanations_of_ended_requests_are_bounded(monkeypatch):
    monkeypatch.setattr(request_stats, "MOST_ENDED", 30)
    monkeypatch.setattr(request_stats, "MOST_ENDED_OF_ALL", 50)
    rig = Rig(prefix_index="radix")

    def serve(tenant: str, count: int) -> None:
        for i in range(count):
            rig.add(f"{tenant}{i}", [i % VOCAB], max_tokens=1, namespace=Namespace(tenant))
            rig.run()

    serve("quiet", 15)
    serve("busy", 100)
    kept = rig.scheduler.request_stats._ended
    assert all(f"quiet{i}" in kept for i in range(15)), "no tenant loses its own to another that asks more"
    assert rig.engine.explain("busy69") is None and rig.engine.explain("busy70") is not None
    for tenant in "abcdefg":
        serve(tenant, 5)
    assert len(kept) == 50 and all(f"quiet{i}" in kept for i in range(9, 15))
    assert len(rig.scheduler.state.requests) == len(rig.scheduler.request_stats._snapshots) == 0


# Beams


def search(tokens: list[int], rules: Rules) -> list[tuple[list[int], float]]:
    """Beam search that recomputes every prefix: no blocks, steps or sequences."""
    one, live = Search(rules), [[]]
    while not one.is_over:
        rows = []
        for beam in live:
            keys = [0]
            for token in tokens + beam:
                keys.append(key_after(keys[-1], token))
            logprobs = logprobs_after(attend(np.array(keys[1:])), VOCAB)
            best = np.argsort(-logprobs, kind="stable")
            rows.append((best, logprobs[best].astype(np.float64)))
        selection = one.advance(live, np.stack([a for a, _ in rows]), np.stack([b for _, b in rows]))
        live = [[*live[beam.parent], beam.token] for beam in selection.live]
    return [(found.token_ids, found.cumulative_logprob) for found in one.hypotheses]


@BOTH
@pytest.mark.parametrize("prefix_index", ["radix", "hash", "none"])
def test_beam_searches_under_pressure_equal_a_search_that_recomputes_everything(prefix_index, steps_in_flight):
    rng = random.Random(steps_in_flight)
    count = [0]

    def fails(step: Step) -> bool:
        count[0] += 1
        return count[0] % 17 == 0

    options = {"max_num_seqs": 5, "watermark": 0.05, "steps_in_flight": steps_in_flight, "max_num_batched_tokens": 16}
    rig = Rig(num_blocks=44, prefix_index=prefix_index, max_model_len=60, fails=fails, **options)
    asked = {}
    for i in range(14):
        width = rng.choice([2, 3, 4, 5])
        tokens, limit = prompt(rng.randrange(2, 19), seed=i % 4), rng.randrange(1, 14)
        stops = tuple(rng.sample(range(VOCAB), 4))
        rules = Rules(width, limit, rng.choice([0.5, 1.0, 2.0]), rng.choice([True, False, "never"]), frozenset(stops))
        beams = Beams(
            width=width,
            num_candidates=width + 8,
            length_penalty=rules.length_penalty,
            early_stopping=rules.early_stopping,
        )
        rig.add(str(i), tokens, max_tokens=limit, n=width, beams=beams, stop_token_ids=stops)
        asked[str(i)] = (tokens, rules)
        if i % 3 == 0:
            rig.add(f"plain{i}", prompt(9, seed=i), max_tokens=12)
        for _ in range(rng.randrange(4)):
            rig.step()
    rig.run()
    for name, (tokens, rules) in asked.items():
        found = [rig.tokens[name, i] for i in range(rules.width)]
        assert found == [ids for ids, _ in search(tokens, rules)][: rules.width], name
    assert rig.scheduler.request_stats.num_preemptions
    assert rig.replay().difference == ""


@pytest.mark.parametrize("prefix_index", ["radix", "hash", "none"])
@pytest.mark.parametrize("failing", [0.0, 0.08])
def test_a_search_that_just_fits_comes_to_its_end(prefix_index, failing):
    """Pools with room for little more than one search, with two searches: no deadlock."""
    for seed in range(40):
        rng = random.Random(seed)
        width, length, most, size = (
            rng.choice([2, 3, 4, 5]),
            rng.randrange(1, 30),
            rng.randrange(1, 14),
            rng.choice([1, 2, 4]),
        )
        alone = -(-(length + most) // size) - length // size
        options = {
            "num_blocks": max(length // size + width * (alone + 1), -(-60 // size)) + rng.choice([0, 1, 3]),
            "block_size": size,
            "max_num_seqs": rng.choice([width, width + 1]),
            "max_num_batched_tokens": rng.choice([width + 1, 8, 16]),
            "steps_in_flight": rng.choice([1, 2]),
        }
        chance = random.Random(seed)
        fails = lambda step, chance=chance: len(step.chunks) > 1 and chance.random() < failing  # noqa: E731
        rig = Rig(prefix_index=prefix_index, max_model_len=60, watermark=0.0, seed=seed, fails=fails, **options)
        beams = Beams(width=width, num_candidates=2 * width, length_penalty=1.0, early_stopping=False)
        asked = {name: prompt(length, seed=i) for i, name in enumerate("ab")}
        for name, tokens in asked.items():
            rig.add(name, tokens, max_tokens=most, n=width, beams=beams)
            rig.step()
        rig.run(2000)
        for name, tokens in asked.items():
            expected = [ids for ids, _ in search(tokens, Rules(width, most))]
            assert [rig.tokens[name, i] for i in range(width)] == expected, seed


def test_explain_of_a_waiting_request_reports_how_long_it_waited():
    rig = Rig(num_blocks=12, prefix_index="radix", watermark=0.0, max_num_seqs=1, max_model_len=40)
    rig.add("a", prompt(9), max_tokens=20)
    rig.add("b", prompt(9), max_tokens=2)
    for _ in range(5):
        rig.step()
    explanation = rig.engine.explain("b")
    assert explanation.state == "waiting" and explanation.waited["rows"] > 0 and explanation.miss is None
    rig.abort("b")
    assert rig.engine.explain("b").waited["rows"] >= explanation.waited["rows"]


def test_a_stop_string_means_nothing_to_a_beam():
    rig = Rig(prefix_index="radix", max_num_seqs=4)
    beams = Beams(width=3, num_candidates=6, length_penalty=1.0, early_stopping=False)
    rig.add("a", prompt(6), max_tokens=5, n=3, beams=beams)
    rig.step()
    rig.finish(0, 1)
    rig.run()
    assert len(rig.reasons) == 3


def test_an_index_that_makes_no_sense_is_begun_again_and_the_engine_goes_on():
    rig = Rig(prefix_index="radix")
    for i in range(3):
        rig.add(str(i), prompt(20) + prompt(4, seed=i + 1), max_tokens=12)
    for _ in range(4):
        rig.step()
    table = next(iter(rig.cache.tables.values()))
    table.cursor.handle.writers.clear()
    assert rig.scheduler.check()
    evicted = rig.cache.num_evicted
    rig.scheduler.repair()
    assert rig.scheduler.check() == [] and rig.cache.num_evicted >= evicted
    rig.run()
    for i in range(3):
        assert rig.tokens[str(i), 0] == script(prompt(20) + prompt(4, seed=i + 1), 12, VOCAB)


def test_repair_frees_blocks_of_an_unknown_request_from_an_inconsistent_index():
    rig = Rig(prefix_index="radix")
    rig.add("a", prompt(20), max_tokens=4)
    rig.run()
    table = rig.cache.new_table(99, prompt(8))
    rig.cache.grow(table, 8)
    table.cursor.handle.writers.clear()
    assert rig.scheduler.check()
    rig.scheduler.repair()
    assert rig.scheduler.check() == []
    assert rig.cache.pools.num_free == rig.cache.pools.num_blocks


def test_two_searches_that_hold_what_the_other_needs_come_to_an_end():
    rig = Rig(num_blocks=40, prefix_index="radix", max_num_seqs=4, max_model_len=60)
    beams = Beams(width=4, num_candidates=12, length_penalty=1.0, early_stopping=False)
    for i in range(3):
        rig.add(str(i), prompt(6, seed=i), max_tokens=9, n=4, beams=beams)
    rig.run()
    for i in range(3):
        expected = search(prompt(6, seed=i), Rules(4, 9))
        assert [rig.tokens[str(i), k] for k in range(4)] == [ids for ids, _ in expected]


def test_a_search_that_cannot_fit_is_refused_by_name():
    rig = Rig(num_blocks=12, max_num_seqs=4, max_model_len=48)
    for width, most in ((5, 2), (4, 30)):
        beams = Beams(width=width, num_candidates=12, length_penalty=1.0, early_stopping=False)
        with pytest.raises(RequestError) as error:
            rig.add("a", prompt(6), max_tokens=most, n=width, beams=beams)
        assert error.value.param == "beam_width"
    assert not rig.engine.has_work


def test_beams_share_their_blocks_until_they_write():
    rig = Rig(num_blocks=60, prefix_index="none", max_num_seqs=4, max_model_len=60)
    beams = Beams(width=4, num_candidates=12, length_penalty=1.0, early_stopping="never")
    rig.add("a", prompt(30), max_tokens=10, n=4, beams=beams)
    rig.run()
    explanation = rig.engine.explain("a")
    assert explanation.saved > 0.5
