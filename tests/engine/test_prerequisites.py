"""Requests that wait for a kind of prerequisite that only this file knows, alone and together with a constraint."""

import json

import pytest
from constrained_rig import ConstrainedRig
from scripted_constraints import ScriptedConstraints, ScriptedPrerequisite
from scripted_engine import VOCAB, Rig

from quire.core.output import EndCause
from quire.core.request import Beams
from quire.core.scheduling_params import SchedulingParams
from quire.engine.engine import Engine
from quire.errors import RequestError
from quire.monitor.update import Watcher
from quire.params import StructuredOutputsParams

CONSTRAINED = {"structured_outputs": StructuredOutputsParams(regex="x")}
LONG = 10**9  # steps
BEAMS = Beams(width=3, num_candidates=6, length_penalty=1.0, early_stopping=False)


class Toys(ScriptedPrerequisite):
    """The toys of requests whose id begins with "toy"."""

    def __init__(self, steps=3, errors=None):
        super().__init__(steps, errors, name="toy")
        self.closed = False

    def is_needed(self, request):
        return request.id.startswith("toy")

    def close(self):
        self.closed = True


def make_rig(toys, *, compile_steps=None, **options):
    """A rig whose engine has toys and, with `compile_steps`, constraints."""
    if compile_steps is None:
        rig, others = Rig(**options), []
    else:
        rig = ConstrainedRig(ScriptedConstraints(), **options)
        others = [ScriptedPrerequisite(compile_steps)]
    rig.engine = Engine(
        rig.scheduler, rig.engine.runner, vocab_size=VOCAB, prerequisites=[*others, toys], clock=rig.clock
    )
    return rig


def outputs(rig, most=200):
    """All outputs until the engine has no work."""
    found = []
    while rig.engine.has_work and most:
        found += rig.step()
        most -= 1
    assert most, "a request waits forever"
    return found


def test_a_request_is_queued_when_its_prerequisite_is_ready_and_others_are_not_delayed():
    toys = Toys(steps=5)
    rig, alone = make_rig(toys), Rig()
    for one in (rig, alone):
        one.add("toy", [1, 2, 3], max_tokens=4)
        one.add("other", [4, 5, 6], max_tokens=2)
    assert (rig.scheduler.num_waiting, rig.scheduler.has_unready) == (2, True)
    rig.step()
    assert (rig.scheduler.num_running, rig.scheduler.num_waiting) == (1, 1)
    rows = json.loads(rig.engine.monitor_update(1, Watcher("", sees_all=True), 0))["requests"]
    (row,) = [row for row in rows if row["id"] == "toy"]
    assert (row["state"], row["reason"], row["seq"]) == ("waiting", "toy: it is not ready", -1)
    rig.run()
    alone.run()
    assert rig.tokens == alone.tokens
    assert not rig.scheduler.has_unready and not toys.left
    waited = rig.scheduler.explain("toy", rig.now).waited
    assert 0 < waited["toy"] < rig.now
    assert "toy" not in rig.scheduler.explain("other", rig.now).waited
    assert rig.replay().difference == ""
    rig.engine.close()
    assert toys.closed


@pytest.mark.parametrize(("toy_steps", "compile_steps"), [(0, 0), (6, 2), (2, 6)])
def test_a_request_waits_for_all_of_its_prerequisites(toy_steps, compile_steps):
    rig, alone = make_rig(Toys(toy_steps), compile_steps=compile_steps), make_rig(Toys(0), compile_steps=0)
    for one in (rig, alone):
        one.add("toy", [1, 2, 3], **CONSTRAINED)
        one.add("x", [1, 2, 3], **CONSTRAINED)
    steps = 0
    while rig.scheduler.num_running == 0 or rig.scheduler.has_unready:
        rig.step()
        steps += 1
    assert steps == 1 + max(toy_steps, compile_steps)
    rig.run()
    alone.run()
    assert rig.tokens == alone.tokens
    waited = rig.scheduler.explain("toy", rig.now).waited
    assert waited["toy"] + waited["constraint"] < rig.now  # the time in which it waited for both counts once
    assert rig.replay().difference == ""


def test_the_error_of_a_prerequisite_ends_the_request():
    rig = make_rig(Toys(2, {"toy": "there is no such toy; take another"}), compile_steps=4)
    rig.add("toy", [1, 2, 3], n=2, **CONSTRAINED)
    rig.add("other", [4, 5, 6])
    ended = [one for one in outputs(rig) if one.request_id == "toy"]
    assert [(one.index, one.end, one.error) for one in ended] == [
        (i, EndCause.NOT_READY, "there is no such toy; take another") for i in range(2)
    ]
    assert rig.reasons["other", 0] == "length"
    assert rig.replay().difference == ""


def test_a_request_that_waits_past_its_deadline_ends():
    toys = Toys(LONG)
    rig = make_rig(toys)
    rig.add("toy", [1, 2, 3], scheduling_params=SchedulingParams(deadline=0.02))
    rig.add("toy without", [1, 2, 3])
    (ended,) = [one for _ in range(60) for one in rig.step()]
    assert (ended.request_id, ended.end) == ("toy", EndCause.DEADLINE)
    assert "waited too long to meet its deadline of 0.02 s" in ended.error
    assert list(toys.left) == ["toy without"]
    assert rig.scheduler.num_waiting == 1
    rig.abort("toy without")
    assert not (toys.left or rig.engine.has_work)
    assert rig.replay().difference == ""


def test_a_beam_search_that_waits_has_an_output_for_each_result():
    rig = make_rig(Toys(1, {"toy": "none is left"}))
    rig.add("toy", [1, 2, 3], n=2, beams=BEAMS)
    ended = outputs(rig)
    assert [(one.index, one.end) for one in ended] == [(0, EndCause.NOT_READY), (1, EndCause.NOT_READY)]


def test_requests_that_have_ended_leave_no_deadline_behind():
    toys = Toys(LONG)
    rig = make_rig(toys, max_num_seqs=2)
    for i in range(300):
        rig.add(f"toy {i}", [1, 2], scheduling_params=SchedulingParams(deadline=1e6 + i))
        rig.abort(f"toy {i}")
    assert len(rig.scheduler._deadlines._unready) < 70


def test_a_prerequisite_that_cannot_be_submitted_leaves_no_request():
    toys = Toys()
    rig = make_rig(toys, compile_steps=LONG)

    def fail(request):
        raise RequestError("the shop is closed", "toy")

    toys.submit = fail
    with pytest.raises(RequestError, match="the shop is closed"):
        rig.add("toy", [1, 2, 3], **CONSTRAINED)
    assert not rig.engine.has_work and not rig.scheduler.has_unready


def test_what_is_ready_for_nobody_is_ignored():
    rig = make_rig(Toys(LONG))
    assert rig.scheduler.ready("unknown", "toy", "", rig.now)
    rig.add("toy", [1, 2, 3])
    assert not rig.scheduler.ready("toy", "a ball", "none is left", rig.now)
    assert rig.scheduler.ready("toy", "toy", "", rig.now)
    assert rig.scheduler.ready("toy", "toy", "twice", rig.now)
    rig.run()
    assert rig.reasons["toy", 0] == "length"
