"""What explanations say of snapshots of recurrent states: which one was used, and why none was deeper."""

import random

import pytest
from scripted_engine import VOCAB, Rig

from quire.cache import states
from quire.core.explanation import Explanation
from quire.core.request import Namespace
from quire.runner.scripted_runner import script


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def run(rig: Rig, name: str, tokens: list[int], **options) -> Explanation:
    """Run a request alone to its end. Its explanation."""
    rig.add(name, tokens, **({"max_tokens": 2} | options))
    rig.run()
    assert rig.tokens[name, 0] == script(tokens, len(rig.tokens[name, 0]), VOCAB, has_states=True)
    explanation = rig.engine.explain(name)
    assert explanation is not None
    return explanation


def rig_of(**options) -> Rig:
    return Rig(**({"prefix_index": "radix", "states": 12, "max_num_batched_tokens": 16} | options))


def figures(explanation: Explanation) -> tuple:
    miss = explanation.miss
    position = explanation.state_position
    return explanation.num_cached_tokens, explanation.num_kv_tokens, position, miss.position, miss.reason


def test_an_explanation_names_the_snapshot_and_says_that_none_deeper_was_taken():
    rig = rig_of()
    common = prompt(21)
    assert figures(run(rig, "first", common + prompt(9, 1))) == (0, 0, None, 0, "never_seen")
    assert figures(run(rig, "second", common + prompt(9, 2))) == (0, 21, None, 0, "no_state")
    assert figures(run(rig, "third", common + prompt(9, 3))) == (21, 21, 21, 21, "never_seen")


def test_statistics_count_snapshots_their_hits_and_the_tokens_computed_without_a_state():
    rig = rig_of(states=4)
    common = prompt(21)
    for i in range(3):
        run(rig, f"{i}", common + prompt(9, i))
    stats = rig.engine.stats()
    assert (stats.state_blocks_used, stats.state_blocks_total, stats.num_snapshots) == (0, 4, 4)
    assert (stats.num_snapshot_hits, stats.num_stateless_tokens, stats.num_evicted_snapshots) == (1, 21, 0)
    assert stats.prefix_hit_tokens == 21
    rig.add("3", common + prompt(9, 3), max_tokens=9)
    rig.step()
    stats = rig.engine.stats()
    assert (stats.state_blocks_used, stats.num_snapshots, stats.num_evicted_snapshots) == (1, 3, 1)


def test_an_explanation_has_the_position_of_the_state_when_inputs_beside_it_match_further():
    rig = rig_of(steps_in_flight=2)
    tokens = prompt(13)
    run(rig, "first", tokens, max_tokens=6)
    again = run(rig, "again", tokens + rig.tokens["first", 0] + prompt(3, 1))
    assert figures(again)[:3] == (18, 18, 17)


@pytest.mark.parametrize("reader", ["same", "other"])
def test_an_evicted_snapshot_is_named_with_the_time_and_the_request_that_needed_its_block(reader):
    tenants = Namespace("same"), Namespace(reader)
    rig = rig_of(states=3, num_blocks=400)
    public = prompt(24)
    run(rig, "first", public, namespace=tenants[0])
    used = run(rig, "used", [*public, *rig.tokens["first", 0][:1], 7], namespace=tenants[0])
    assert used.state_position is not None
    for i in range(12):
        run(rig, f"other {i}", prompt(24, 10 + i), namespace=tenants[1])
    again = run(rig, "again", [*public, *rig.tokens["first", 0][:1], *prompt(5, 3)], namespace=tenants[0])
    assert again.miss.reason == "state_evicted"
    assert (again.num_kv_tokens, again.num_cached_tokens, again.miss.position) == (25, 0, 0)
    assert used.arrived < again.miss.evicted_at < again.arrived
    if reader == "same":
        assert again.miss.evicted_for.startswith("other")
    else:
        assert again.miss.evicted_for is None, "it belongs to another tenant"


def test_the_record_of_evicted_snapshots_is_bounded_and_leaves_with_their_blocks(monkeypatch):
    monkeypatch.setattr(states, "_MOST_EVICTED", 5)
    rig = rig_of(states=2, num_blocks=2000, max_model_len=200)
    for i in range(30):
        run(rig, f"{i}", prompt(24, i))
    assert rig.cache.states.num_evicted > 20
    seen = {i: [*prompt(24, i), *rig.tokens[str(i), 0][:1], *prompt(5, 99)] for i in (0, 27)}
    assert run(rig, "old", seen[0]).miss.reason == "no_state"
    assert run(rig, "new", seen[27]).miss.reason == "state_evicted"
    rig.cache.flush()
    assert run(rig, "flushed", seen[27]).miss.reason == "evicted"


def test_requests_beside_one_that_will_leave_a_snapshot_see_it_being_computed():
    rig = rig_of(num_blocks=400, long_prefill_token_threshold=8)
    common = prompt(60)
    run(rig, "first", common + prompt(9, 1))
    rig.add("second", common + prompt(9, 2), max_tokens=2)
    rig.step()
    rig.add("third", common + prompt(9, 3), max_tokens=2)
    rig.step()
    third = rig.engine.explain("third")
    rig.run()
    assert figures(third) == (0, 60, None, 0, "state_being_computed")
    assert figures(rig.engine.explain("second"))[1:] == (60, None, 0, "no_state")
    rig.add("stranger", common + prompt(9, 4), max_tokens=2, namespace=Namespace("stranger"))
    rig.run()
    assert rig.engine.explain("stranger").miss.reason == "never_seen"


def test_models_without_states_name_no_snapshot():
    rig = Rig(prefix_index="radix")
    for name in ("first", "again"):
        rig.add(name, prompt(21), max_tokens=2)
        rig.run()
    again = rig.engine.explain("again")
    assert figures(again) == (20, 20, None, 20, "last_token")
