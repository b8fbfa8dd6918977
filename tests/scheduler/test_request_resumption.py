"""Resumption of a request in a new scheduler, from its known tokens, gives the undisturbed output."""

from dataclasses import dataclass, field

import pytest
from example_budget import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import VOCAB, Rig

from quire.core.request import Beams, KnownOutput, Request
from quire.core.scheduling_params import SchedulingParams
from quire.core.step import Pooling
from quire.errors import DeadlineUnreachable, RequestError
from quire.params import SamplingParams
from quire.runner.scripted_runner import script


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(7 * i + salt) % VOCAB for i in range(length)]


def known(*lengths: int | None, of: list[int]) -> tuple[KnownOutput, ...]:
    """The given number of tokens per sequence; None for an ended one."""
    return tuple(KnownOutput(of[:3], finished=True) if one is None else KnownOutput(of[:one]) for one in lengths)


@dataclass
class Delivered:
    """A front end's state of one sequence."""

    tokens: list[int] = field(default_factory=list)
    likely: list[float] = field(default_factory=list)
    reason: str | None = None
    total: float = 0.0
    stop_token: int | None = None


@dataclass
class Ask:
    """A request. stops[i]: the length at which a stop string ends sequence i."""

    prompt: list[int]
    params: SamplingParams
    arrives: int = 0  # before which step
    stops: dict[int, int] = field(default_factory=dict)


class FrontEnd:
    """Adds requests to the current scheduler, and collects their outputs."""

    def __init__(self, asked: list[Ask], new_rig):
        self.asked = asked
        self.new_rig = new_rig
        self.rigs = [new_rig()]
        self.delivered = {
            (str(i), index): Delivered() for i, ask in enumerate(asked) for index in range(ask.params.num_sequences)
        }
        self.accepted: list[str] = []

    def run(self, kills: set[int]) -> dict[tuple[str, int], Delivered]:
        """kills: steps before which the scheduler is lost."""
        at = 0
        while len(self.accepted) < len(self.asked) or self.rigs[-1].engine.has_work:
            if at in kills:
                self.kill()
            for i, ask in enumerate(self.asked):
                if ask.arrives == at:
                    self.rigs[-1].engine.add(Request(str(i), ask.prompt, ask.params))
                    self.accepted.append(str(i))
            for output in self.rigs[-1].step():
                self.hear(output)
            at += 1
            assert at < 5_000, "no progress"
        self.rigs[-1].run()  # asserts that all blocks are free
        for rig in self.rigs:
            assert rig.replay().difference == ""
            assert rig.engine.stats().failed_steps == 0
        return self.delivered

    def hear(self, output) -> None:
        one, ask = self.delivered[output.request_id, output.index], self.asked[int(output.request_id)]
        if one.reason is not None:
            return  # the engine may not have received the stop yet
        one.tokens += output.token_ids
        if output.logprobs is not None:
            one.likely += output.logprobs.values[:, 0].tolist()
        if output.cumulative_logprob is not None:
            one.total = output.cumulative_logprob
        one.reason, one.stop_token = output.finish_reason, output.stop_token
        stop = ask.stops.get(output.index)
        if stop is not None and len(one.tokens) >= stop and one.reason is None:
            one.reason = "stop string"
            self.rigs[-1].finish(output.seq_id, stop)

    def kill(self) -> None:
        self.rigs.append(self.new_rig())
        for request_id in self.accepted:
            ask = self.asked[int(request_id)]
            delivered = [self.delivered[request_id, index] for index in range(ask.params.num_sequences)]
            if all(one.reason for one in delivered):
                continue
            have = [KnownOutput(list(one.tokens), one.reason is not None, one.total) for one in delivered]
            self.rigs[-1].engine.add(Request(request_id, ask.prompt, ask.params, known_outputs=have))


@st.composite
def asks(draw) -> Ask:
    n = draw(st.integers(1, 3))
    best_of = draw(st.sampled_from([None, None, 3]))
    params = {"n": n, "best_of": best_of, "max_tokens": draw(st.integers(1, 24)), "temperature": 0.0}
    params["min_tokens"] = draw(st.integers(0, params["max_tokens"]))
    params["stop_token_ids"] = draw(st.sampled_from([(), (3, 17, 40)]))
    params["logprobs"] = draw(st.sampled_from([None, 2]))
    length, salt = draw(st.integers(1, 40)), draw(st.integers(0, 3))
    stops = draw(st.dictionaries(st.integers(0, (best_of or n) - 1), st.integers(1, 12), max_size=2))
    return Ask(prompt(length, salt), SamplingParams(**params), draw(st.integers(0, 15)), stops)


@settings(max_examples=examples(120))
@given(
    asked=st.lists(asks(), min_size=1, max_size=6),
    kills=st.sets(st.integers(1, 40), min_size=1, max_size=5),
    windows=st.sampled_from([(0,), (8,), (0, 8)]),
    prefix_index=st.sampled_from(["none", "radix", "hash"]),
    steps_in_flight=st.sampled_from([1, 2]),
    num_blocks=st.sampled_from([24, 40]),
    max_num_seqs=st.sampled_from([2, 8]),
    policy=st.sampled_from(["fcfs", "lpm", "fair"]),
    num_host_blocks=st.sampled_from([0, 16]),
)
def test_any_number_of_restarts_changes_no_token(asked, kills, **chosen):
    def new_rig():
        return Rig(max_model_len=80, max_num_batched_tokens=12, **chosen)

    undisturbed = FrontEnd(asked, new_rig).run(set())
    disturbed = FrontEnd(asked, new_rig).run(kills)
    assert disturbed == undisturbed
    for (request_id, _), one in disturbed.items():
        ask = asked[int(request_id)]
        assert one.tokens == script(ask.prompt, len(one.tokens), VOCAB, chosen["windows"])
        assert len(one.likely) in (0, len(one.tokens))
        if ask.params.is_ranked:
            assert one.total == sum(one.likely, 0.0)


def opened(have: tuple[KnownOutput, ...]) -> dict[int, list[object]]:
    """The new-row data of each sequence, without its row and ids."""
    params = SamplingParams(
        n=2, temperature=0.8, seed=11, max_tokens=9, min_tokens=6, stop_token_ids=(3,), presence_penalty=1.0,
        frequency_penalty=0.5, repetition_penalty=1.2, logit_bias={4: 1.0},
    )  # fmt: skip
    rig, steps = Rig(), []
    rig.on_launch = steps.append
    rig.engine.add(Request("a", prompt(6), params, known_outputs=have))
    rig.run()
    delivered = {}
    for opens in (step.opens for step in steps):
        lists = [(kind, tokens.tolist(), weights.tolist(), row) for row, kind, tokens, weights in opens.lists]
        for i, row in enumerate(opens.rows.tolist()):
            columns = [getattr(opens, name)[i] for name in opens.__struct_fields__ if name not in ("rows", "lists")]
            delivered[int(opens.sample_indices[i])] = [*columns, *(one[:3] for one in lists if one[3] == row)]
    return delivered


def test_a_resumed_sequence_opens_its_row_with_the_same_sampling_parameters():
    again = opened(known(2, 4, of=[5, 6, 7, 8]))
    assert again == opened(())
    assert len(again) == 2
    assert len(again[0]) > 16


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_sequences_of_one_request_go_on_from_where_each_stood(steps_in_flight):
    rig, want = Rig(steps_in_flight=steps_in_flight, prefix_index="radix"), script(prompt(9), 20, VOCAB)
    params = SamplingParams(temperature=0.0, n=4, max_tokens=20)
    rig.engine.add(Request("a", prompt(9), params, known_outputs=known(7, None, 0, 19, of=want)))
    rig.run()
    assert rig.tokens == {("a", 0): want[7:], ("a", 2): want, ("a", 3): want[19:]}
    assert set(rig.reasons.values()) == {"length"}
    assert sum(rig.scheduler.sizes) < 2 * (9 + 20) + 20, "the prompt was computed more than once"


def test_the_prefix_lookup_of_a_resumed_request_covers_its_known_tokens():
    rig, want = Rig(prefix_index="radix"), script(prompt(12), 20, VOCAB)
    rig.add("before", prompt(12), max_tokens=12)
    rig.run()
    del rig.scheduler.sizes[:]
    rig.engine.add(
        Request("a", prompt(12), SamplingParams(temperature=0.0, max_tokens=14), known_outputs=known(10, of=want))
    )
    rig.run()
    assert rig.tokens["a", 0] == want[10:14]
    assert rig.cached["a", 0] == 12
    assert rig.scheduler.sizes[0] == 1


def test_penalties_and_ends_count_from_the_original_prompt():
    want = script(prompt(5), 30, VOCAB)
    stop = want[3]
    first = next(i for i in range(8, 30) if want[i] == stop) if stop in want[8:] else None
    rig = Rig()
    params = SamplingParams(temperature=0.0, max_tokens=30, min_tokens=8, stop_token_ids=(stop,))
    rig.engine.add(Request("a", prompt(5), params, known_outputs=known(6, of=want)))
    rig.run()
    assert rig.tokens["a", 0] == want[6 : 30 if first is None else first + 1]


@pytest.mark.parametrize(
    ("have", "params", "reason", "stop_token"),
    [
        ([5, 6, 7], {"max_tokens": 3}, "length", None),
        ([5, 6], {"stop_token_ids": (6,)}, "stop", 6),
        ([5, 6, 7], {"stop_token_ids": (6,)}, "stop", 6),  # no engine can have generated them
    ],
)
@pytest.mark.parametrize("n", [1, 3])
def test_a_resumed_sequence_whose_known_tokens_end_it_finishes_at_once(have, params, reason, stop_token, n):
    rig = Rig()
    params = SamplingParams(temperature=0.0, n=n, **params)
    others = [KnownOutput()] * (n - 1)
    rig.engine.add(Request("a", [1, 2, 3], params, known_outputs=[KnownOutput(have), *others]))
    first = rig.step()[0]
    assert (first.index, first.token_ids, first.finish_reason, first.stop_token) == (0, [], reason, stop_token)
    rig.run()
    assert len(rig.reasons) == n
    assert rig.replay().difference == ""


def test_a_stop_token_before_min_tokens_has_ended_nothing():
    rig = Rig()
    params = SamplingParams(temperature=0.0, max_tokens=9, min_tokens=4, stop_token_ids=(6,))
    rig.engine.add(Request("a", [1, 2, 3], params, known_outputs=[KnownOutput([5, 6, 7])]))
    rig.run()
    assert len(rig.tokens["a", 0]) >= 1


def test_a_resumed_request_whose_sequences_are_finished_has_no_output():
    rig = Rig()
    rig.engine.add(Request("a", [1, 2], SamplingParams(n=2), known_outputs=[KnownOutput([4], finished=True)] * 2))
    assert not rig.engine.has_work
    rig.add("a", [1, 2])  # its id is free
    rig.run()
    assert len(rig.tokens["a", 0]) == 8
    assert rig.replay().difference == ""


def test_an_abort_drops_pending_output_of_a_resumed_request():
    rig = Rig()
    rig.engine.add(Request("a", [1, 2], SamplingParams(max_tokens=1, seed=1), known_outputs=[KnownOutput([4])]))
    rig.abort("a")
    assert not rig.engine.has_work


@pytest.mark.parametrize(
    ("have", "more", "message"),
    [
        ([KnownOutput(), KnownOutput()], {}, "2 entries"),
        ([KnownOutput([1] * 9)], {}, "max_tokens is 8"),
        ([KnownOutput([VOCAB])], {}, "out of vocabulary"),
        ([KnownOutput([-1])], {}, "out of vocabulary"),
        (
            [KnownOutput([1])],
            {"beams": Beams(width=1, num_candidates=2, length_penalty=1.0, early_stopping=False)},
            "starts from the beginning",
        ),
        ([KnownOutput()], {"pooling": Pooling.LAST, "max_tokens": 0}, "starts from the beginning"),
        ([KnownOutput([1])], {"temperature": 1.0}, "seed"),
    ],
)
def test_known_tokens_that_cannot_be_are_refused(have, more, message):
    rig = Rig()
    special = {name: more.pop(name) for name in ("beams", "pooling") if name in (more := dict(more))}
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": 8} | more))
    with pytest.raises(RequestError, match=message):
        rig.engine.add(Request("a", [1, 2], params, known_outputs=have, **special))
    assert not rig.engine.has_work


def test_resumed_beam_search_and_pooling_start_over_and_ignore_their_deadline():
    rig = Rig()
    for i in range(3):
        rig.add(f"warm {i}", prompt(40, i), max_tokens=20)
        rig.run()
    rig.add("running", prompt(40), max_tokens=20)
    rig.step()
    hurry = SchedulingParams(deadline=1e-6)
    with pytest.raises(DeadlineUnreachable):
        rig.add("a", prompt(40, 2), max_tokens=20, scheduling_params=hurry)
    params = SamplingParams(temperature=0.0, max_tokens=2)
    beams = Beams(width=2, num_candidates=4, length_penalty=1.0, early_stopping=False)
    rig.engine.add(Request("search", prompt(4), params, beams=beams, resumed=True))
    pooled = SamplingParams(temperature=0.0, max_tokens=0)
    rig.engine.add(Request("pool", prompt(4), pooled, pooling=Pooling.LAST, resumed=True))
    rig.engine.add(
        Request("late", prompt(4), params, scheduling_params=hurry, resumed=True)
    )  # ends later with the error
    rig.run()
    assert rig.reasons["search", 0] == "length"
    assert rig.reasons["pool", 0] == "stop"
    assert rig.reasons["late", 0] == "abort"


def test_resumed_requests_keep_their_queue_order_before_new_ones():
    rig = Rig(max_num_seqs=1)
    want = script(prompt(4), 9, VOCAB)
    params = SamplingParams(temperature=0.0, max_tokens=9)
    for i, length in enumerate((3, 0, 5)):
        rig.engine.add(Request(str(i), prompt(4), params, known_outputs=known(length, of=want)))
    rig.add("new", prompt(4))
    ended = []
    while rig.engine.has_work:
        ended += [output.request_id for output in rig.step() if output.finish_reason]
    assert ended == ["0", "1", "2", "new"]
