"""Outputs delivered over several engines, cut off at random, equal those of one undisturbed engine."""

import random
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.output import EndCause, Output
from quire.core.request import Beams, Request
from quire.core.step import Logprobs, Pooling
from quire.fleet.open_requests import OpenRequests
from quire.params import SamplingParams

HIDDEN = 3
POOLED = {  # of the states (positions, hidden) of a chunk, or of a prompt
    Pooling.MEAN: lambda states: states.sum(axis=0),
    Pooling.LAST: lambda states: states[-1],
    Pooling.CLS: lambda states: states[0],
    Pooling.MAX: lambda states: states.max(axis=0),
}


@dataclass
class Plan:
    """A request with all outputs of an undisturbed engine."""

    request: Request
    tokens: list[list[int]]  # per sequence
    ends: list[str]
    stops: dict[int, int] = field(default_factory=dict)  # sequence: tokens after which a stop string is complete
    pooled: np.ndarray | None = None  # (prompt, hidden): POOLED says what is delivered

    def logprobs(self, start: int, stop: int) -> Logprobs:
        """Logprobs of prompt tokens."""
        places = np.arange(start, stop, dtype=np.int32)
        return Logprobs(places[:, None], -places[:, None].astype(np.float32), places)

    def total(self, index: int, count: int) -> float:
        """Sum of the logprobs of a sequence's first tokens: integers, so that the order of addition does not matter."""
        return float(-sum(self.tokens[index][:count]))


def plan_of(dice: random.Random, name: str) -> Plan:
    prompt = list(range(dice.randint(1, 12)))
    kind = dice.choice(["sample", "sample", "ranked", "score", "beams", "pool"])
    if kind == "pool":
        pooling = dice.choice([Pooling.MEAN, Pooling.LAST, Pooling.MAX, Pooling.CLS])
        request = Request(name, prompt, SamplingParams(max_tokens=0), pooling=pooling)
        pooled = np.array([[dice.randint(0, 99) for _ in range(HIDDEN)] for _ in prompt], np.float32)
        return Plan(request, [[]], [EndCause.STOP], pooled=pooled)
    n = dice.randint(1, 4)
    scored = {"prompt_logprobs": 0} if kind == "score" or (kind != "beams" and dice.random() < 0.5) else {}
    best_of = n + dice.randint(1, 2) if kind == "ranked" else None
    params = SamplingParams(n=n, best_of=best_of, max_tokens=0 if kind == "score" else 20, seed=7, **scored)
    beams = Beams(width=4, num_candidates=8, length_penalty=1.0, early_stopping=False) if kind == "beams" else None
    sequences = n if kind == "beams" else params.num_sequences
    tokens = [[dice.randint(0, 9) for _ in range(0 if kind == "score" else dice.randint(1, 20))]
              for _ in range(sequences)]  # fmt: skip
    plan = Plan(
        Request(name, prompt, params, beams=beams),
        tokens,
        [dice.choice([EndCause.STOP, EndCause.LENGTH]) for _ in tokens],
    )
    if kind in ("sample", "ranked"):
        plan.stops = {i: dice.randint(1, len(ids)) for i, ids in enumerate(tokens) if dice.random() < 0.4}
    return plan


class PretendEngine:
    """Sends each request's plan in parts of random size, and continues after known tokens."""

    def __init__(self, dice: random.Random, plans: dict[str, Plan], first_id: int) -> None:
        self.dice = dice
        self.plans = plans
        self.next_id = first_id
        self.open: dict[int, tuple[str, int]] = {}
        self.said: dict[int, int] = {}  # known output tokens of a sequence
        self.totals: dict[int, float] = {}
        self.num_scored: dict[str, int] = {}  # prompt tokens whose logprobs or states were sent
        self.wants: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        name, plan = request.id, self.plans[request.id]
        new = msgspec.structs.replace(request, params=plan.request.params, known_outputs=(), resumed=False, waited=0.0)
        assert new == plan.request
        self.wants[name] = request
        self.num_scored[name] = 1 if request.params.prompt_logprobs is not None else 0
        if request.known_outputs:
            assert len(request.known_outputs) == len(plan.tokens)
            assert request.params == plan.request.params.changed(prompt_logprobs=None)
        for index, tokens in enumerate(plan.tokens):
            known = request.known_outputs[index] if request.known_outputs else None
            seq_id, self.next_id = self.next_id, self.next_id + 1
            if known is not None and known.finished:
                continue
            self.open[seq_id], self.said[seq_id] = (name, index), 0
            if known is not None:
                assert known.token_ids == tokens[: len(known.token_ids)]
                if plan.request.params.is_ranked:
                    assert known.cumulative_logprob == plan.total(index, len(known.token_ids))
                self.said[seq_id] = len(known.token_ids)

    def finish(self, seq_id: int, num_tokens: int) -> None:
        if seq_id in self.open:
            name, index = self.open.pop(seq_id)
            assert self.plans[name].stops[index] == num_tokens

    def step(self) -> list[Output]:
        outputs: list[Output] = []
        for seq_id, (name, index) in list(self.open.items()):
            if seq_id in self.open and self.dice.random() < 0.7:
                outputs += self.say(seq_id, self.plans[name], index)
        return outputs

    def say(self, seq_id: int, plan: Plan, index: int) -> list[Output]:
        request = self.wants[plan.request.id]
        name, length = request.id, len(request.prompt)
        if request.beams is not None:
            return self.results(plan) if self.dice.random() < 0.3 else []
        if request.pooling:
            return [self.pool(seq_id, plan)]
        num_scored = self.num_scored[name]
        if request.params.prompt_logprobs is not None and num_scored < length:
            if index:
                return []  # the others wait for the prompt of the first one
            upto = self.num_scored[name] = self.dice.randint(num_scored + 1, length)
            scored = plan.logprobs(num_scored, upto)
            if upto < length:
                return [Output(name, index, seq_id, [], prompt_logprobs=scored)]
        else:
            scored = None
        return [self.sampled(seq_id, plan, index, scored)]

    def sampled(self, seq_id: int, plan: Plan, index: int, scored: Logprobs | None) -> Output:
        start = self.said[seq_id]
        tokens = plan.tokens[index]
        upto = self.said[seq_id] = min(len(tokens), start + self.dice.randint(1, 3))
        over = upto == len(tokens)
        if over:
            del self.open[seq_id]
        total = plan.total(index, upto) if plan.request.params.is_ranked and upto > start else None
        reason = plan.ends[index] if over else None
        name = plan.request.id
        return Output(name, index, seq_id, tokens[start:upto], reason, prompt_logprobs=scored, cumulative_logprob=total)

    def results(self, plan: Plan) -> list[Output]:
        name = plan.request.id
        ids = [seq_id for seq_id, (of, _) in self.open.items() if of == name]
        for seq_id in ids:
            del self.open[seq_id]
        return [
            Output(name, i, seq_id, tokens, plan.ends[i], cumulative_logprob=plan.total(i, len(tokens)))
            for i, (seq_id, tokens) in enumerate(zip(ids, plan.tokens, strict=True))
        ]

    def pool(self, seq_id: int, plan: Plan) -> Output:
        request, states = plan.request, plan.pooled
        assert states is not None
        num_scored, name = self.num_scored[request.id], request.id
        upto = self.num_scored[name] = self.dice.randint(num_scored + 1, len(request.prompt))
        over = upto == len(request.prompt)
        if over:
            del self.open[seq_id]
        part = POOLED[request.pooling](states[num_scored:upto])
        if request.pooling is Pooling.LAST and not over:
            part = None
        part = None if part is None else np.frombuffer(part.tobytes(), np.float32)  # read-only, as after decoding
        return Output(name, 0, seq_id, [], EndCause.STOP if over else None, pooled=part)


@dataclass
class Heard:
    """What a client has received of one sequence."""

    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    scored: list[int] = field(default_factory=list)
    pooled: np.ndarray | None = None
    total: float | None = None


class Front:
    """A front end: reads from the open_requests, finds stop strings later, and sometimes starts another engine."""

    def __init__(self, dice: random.Random, plans: list[Plan], deaths: int) -> None:
        self.dice = dice
        self.plans = {plan.request.id: plan for plan in plans}
        self.heard = {(name, i): Heard() for name, plan in self.plans.items() for i in range(len(plan.tokens))}
        self.open_requests = OpenRequests()
        self.deaths = deaths
        self.unread: list[Output] = []
        self.engine = PretendEngine(dice, self.plans, 0)
        for plan in plans:
            self.engine.add(plan.request)
        self.open_requests.add(plan.request for plan in plans)

    def run(self) -> None:
        for turn in range(10_000):
            if not len(self.open_requests) and not self.unread:
                return
            if self.deaths and self.dice.random() < 0.2:
                self.deaths -= 1
                self.restart(turn)
            for output in self.engine.step():
                self.hear(output)
            if self.dice.random() < 0.5:  # the reader may be late
                self.read()
        raise AssertionError(f"never over: {list(self.open_requests)}")

    def restart(self, turn: int) -> None:
        self.engine = PretendEngine(self.dice, self.plans, 1000 * (turn + 1))
        names = list(self.open_requests)
        for name in names:
            self.engine.add(self.open_requests.resume(name))

    def hear(self, output: Output) -> None:
        heard = self.heard[output.request_id, output.index]
        forwarded, stopped_after = self.open_requests.record_output(output)
        if stopped_after is not None:
            self.engine.finish(output.seq_id, stopped_after)
        if forwarded is None:
            return
        assert heard.reason is None, "something came behind the end"
        self.unread.append(forwarded)

    def read(self) -> None:
        for output in self.unread:
            heard = self.heard[output.request_id, output.index]
            if output.prompt_logprobs is not None:
                heard.scored += output.prompt_logprobs.ids[:, 0].tolist()
            if heard.reason is not None:
                continue  # as in Transcript
            heard.tokens += output.token_ids
            heard.pooled = output.pooled if heard.pooled is None else heard.pooled + output.pooled
            heard.total = heard.total if output.cumulative_logprob is None else output.cumulative_logprob
            heard.reason = output.finish_reason
            stop = self.plans[output.request_id].stops.get(output.index)
            if stop is not None and len(heard.tokens) >= stop:
                del heard.tokens[stop:]
                heard.reason = "stop string"
                seq_id = self.open_requests.finish(output.request_id, output.index, stop)
                if seq_id is not None:
                    self.engine.finish(seq_id, stop)
        self.unread.clear()

    def check(self) -> None:
        for (name, index), heard in self.heard.items():
            plan, stop = self.plans[name], self.plans[name].stops.get(index)
            assert heard.tokens == plan.tokens[index][:stop]
            assert heard.reason == ("stop string" if stop else plan.ends[index])
            wanted = range(1, len(plan.request.prompt)) if plan.request.params.prompt_logprobs is not None else ()
            assert heard.scored == (list(wanted) if index == 0 else [])
            if plan.request.beams is not None or (plan.request.params.is_ranked and stop is None):
                assert heard.total == plan.total(index, len(plan.tokens[index]))
            if plan.pooled is not None:
                whole = POOLED[plan.request.pooling](plan.pooled)
                assert np.array_equal(heard.pooled, whole)
        assert len(self.open_requests) == 0
        assert list(self.open_requests) == []


@given(seed=st.integers(0, 2**32 - 1), deaths=st.sampled_from([0, 1, 3, 10]))
@settings(max_examples=300)
def test_outputs_over_many_engine_restarts_equal_those_of_one_engine(seed, deaths):
    dice = random.Random(seed)
    front = Front(dice, [plan_of(dice, f"r{i}") for i in range(dice.randint(1, 5))], deaths)
    front.run()
    front.check()


def params_of(**values):
    return SamplingParams(max_tokens=5, seed=1, **values)


def test_a_request_that_said_nothing_yet_begins_anew_and_is_never_refused():
    open_requests = OpenRequests()
    asked = Request("a", [1, 2], params_of(prompt_logprobs=0))
    open_requests.add([asked])
    resumed = open_requests.resume("a")
    assert 0 < resumed.waited < 60
    assert resumed == msgspec.structs.replace(asked, resumed=True, waited=resumed.waited)


def test_a_resumed_request_without_tokens_has_the_prompt_tokens_that_were_counted():
    open_requests = OpenRequests()
    asked = [Request(name, [1, 2, 3], params_of()) for name in "ab"]
    open_requests.add(asked)
    for number in (1, 2):
        open_requests.record_prompts({"a": number})
    assert [open_requests.resume(name).num_counted for name in "ab"] == [2, 0]


def test_a_resumed_request_has_its_known_tokens_and_asks_for_no_prompt_logprobs():
    open_requests = OpenRequests()
    open_requests.add([Request("a", [1, 2], params_of(n=2, prompt_logprobs=0))])
    open_requests.record_output(Output("a", 0, 7, [5, 6]))
    open_requests.record_output(Output("a", 1, 8, [9], EndCause.STOP, stop_token=9))
    resumed = open_requests.resume("a")
    assert [(one.token_ids, one.finished) for one in resumed.known_outputs] == [([5, 6], False), ([9], True)]
    assert resumed.params == params_of(n=2)
    assert resumed.resumed


def test_an_undelivered_stop_is_sent_to_the_engine_that_reaches_its_position():
    open_requests = OpenRequests()
    open_requests.add([Request("a", [1], params_of(n=2))])
    open_requests.record_output(Output("a", 0, 7, [5, 6]))
    open_requests.resume("a")  # the engine died
    assert open_requests.finish("a", 0, 1) is None  # and the next one's sequence id is not known
    assert open_requests.record_output(Output("a", 0, 107, [8])) == (None, 1)
    assert open_requests.record_output(Output("a", 0, 107, [8], EndCause.LENGTH)) == (
        None,
        None,
    )  # it has ended there, too
    assert [one.token_ids for one in open_requests.resume("a").known_outputs] == [[5], []]


def test_a_stop_is_sent_to_the_engine_that_generated_it():
    open_requests = OpenRequests()
    open_requests.add([Request("a", [1], params_of())])
    open_requests.record_output(Output("a", 0, 7, [5, 6]))
    assert open_requests.finish("a", 0, 1) == 7
    assert "a" not in open_requests
    assert open_requests.finish("a", 0, 1) is None
    assert open_requests.record_output(Output("a", 0, 7, [8])) == (None, None)


@pytest.mark.parametrize("reason", EndCause)
def test_entries_vanish_with_their_last_sequence(reason):
    open_requests = OpenRequests()
    open_requests.add([Request("a", [1], params_of(n=2)), Request("b", [1], params_of())])
    open_requests.record_output(Output("a", 1, 8, [], reason))
    assert list(open_requests) == ["a", "b"]
    open_requests.record_output(Output("a", 0, 7, [4], reason))
    assert list(open_requests) == ["b"]
    assert open_requests.remove("b")
    assert not open_requests.remove("b")
    assert len(open_requests) == 0


def test_a_failed_request_ends_each_open_sequence():
    open_requests = OpenRequests()
    open_requests.add([Request("a", [1], params_of(n=3))])
    open_requests.record_output(Output("a", 1, 8, [4], EndCause.LENGTH))
    outputs = open_requests.fail("a", "why")
    assert [(one.index, one.finish_reason, one.error) for one in outputs] == [(0, "error", "why"), (2, "error", "why")]
    assert "a" not in open_requests


def test_output_of_an_unknown_request_is_dropped():
    assert OpenRequests().record_output(Output("a", 0, 7, [4])) == (None, None)


def test_a_pause_of_the_client_does_not_count_towards_the_deadline(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("quire.fleet.open_requests.time.monotonic", lambda: now[0])
    open_requests = OpenRequests()
    open_requests.add([Request("a", [1, 2], params_of())])
    now[0] = 105.0
    assert open_requests.resume("a").waited == 5.0
    open_requests.count_from_now("a")
    open_requests.count_from_now("unknown")
    now[0] = 107.0
    assert open_requests.resume("a").waited == 2.0
