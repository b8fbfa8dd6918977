"""Errors of programs are raised where their result is read, and affect nothing else."""

import asyncio
import gc
import logging
import signal
import threading
import time
import traceback

import pytest
from fake_lang_backend import Pretend
from waiting import until, wait_until

import quire.lang as sgl
from quire.errors import RequestError
from quire.lang.select import token_length_normalized

BOOM = RequestError("no such thing", "stop")


def fails_at(mark):
    return lambda text, params: BOOM if text.endswith(mark) else " yes"


@sgl.function
def two(s, mark="bad"):
    s += "good" + sgl.gen("x")
    s += mark + sgl.gen("y") + "behind" + sgl.gen("z")


@sgl.function
def reads(s):
    s += "a" + sgl.gen("x")
    return s["x"]  # later operations may run when it is set


def test_a_failed_call_ends_its_state_and_reading_unwritten_variables_raises_its_error(pretend, caplog):
    state = two.run(backend=pretend(fails_at("bad")))
    assert state.error() is BOOM
    assert state["x"] == " yes"
    for read in (lambda: state["y"], lambda: state["z"], state.text, state.messages, lambda: state["none"]):
        with pytest.raises(RequestError, match="no such thing"):
            read()
    with pytest.raises(RequestError):
        state.get_meta_info("y")
    assert "no such thing" in caplog.text
    state += "more" + sgl.gen("y")
    assert state.error() is BOOM


def test_a_function_that_stumbles_over_a_failed_call_raises_it(pretend):
    @sgl.function
    def program(s):
        s += "bad" + sgl.gen("x")
        s += s["x"]

    with pytest.raises(RequestError, match="no such thing"):
        program.run(backend=pretend(fails_at("bad")))


def test_in_a_batch_a_failed_call_is_its_states_own_matter(pretend):
    @sgl.function
    def program(s, mark, reads):
        s += mark + sgl.gen("x")
        return s["x"] if reads else None

    backend = pretend(fails_at("bad"))
    entries = [("good", True), ("bad", True), ("bad", False), ("good", False)]
    states = program.run_batch(entries, backend=backend)
    assert [state.error() for state in states] == [None, BOOM, BOOM, None]
    assert states[0].ret_value == " yes"


def test_in_a_batch_the_functions_own_error_is_raised(pretend):
    @sgl.function
    def program(s, number):
        s += sgl.gen("x")
        return 1 // number

    with pytest.raises(ZeroDivisionError):
        program.run_batch([(1,), (0,), (2,)], backend=pretend())


def test_a_users_error_keeps_its_traceback_and_gives_up_what_runs(pretend):
    @sgl.function
    def program(s):
        s += "wait" + sgl.gen("x")
        the_line_that_is_wrong = {}
        return the_line_that_is_wrong["key"]

    backend = pretend(gates=["wait"])
    with pytest.raises(KeyError) as caught:
        program.run(backend=backend)
    assert "the_line_that_is_wrong" in "".join(traceback.format_exception(caught.value))
    wait_until(lambda: backend.num_running == 0)


def test_a_fork_that_fails_leaves_its_parent_until_they_are_joined(pretend):
    @sgl.function
    def program(s, joins):
        s += "good" + sgl.gen("x")
        forks = s.fork(2)
        forks += ["bad" + sgl.gen("y"), "good" + sgl.gen("y")]
        if joins:
            forks.join()
        s += "on" + sgl.gen("z")
        return forks

    backend = pretend(fails_at("bad"))
    alone = program.run(joins=False, backend=backend)
    assert alone.error() is None and alone["z"] == " yes"
    assert [fork.error() for fork in alone.ret_value] == [BOOM, None]
    joined = program.run(joins=True, backend=backend)
    assert joined.error() is BOOM and joined["x"] == " yes"
    for name in ("y", "z"):
        with pytest.raises(RequestError):
            joined[name]


def test_forks_of_what_failed_fail_with_it(pretend):
    @sgl.function
    def program(s):
        s += "bad" + sgl.gen("x")
        early = s.fork(1)[0]
        early += sgl.gen("y")
        assert s.error() is BOOM
        late = s.fork(1)[0]
        late += sgl.gen("y")
        return early.error(), late.error()

    assert program.run(backend=pretend(fails_at("bad"))).ret_value == (BOOM, BOOM)


def test_an_unknown_variable_is_a_key_error_that_names_the_nearest(pretend):
    state = two.run(backend=pretend())
    with pytest.raises(KeyError, match="did you mean 'x'"):
        state["xx"]


def test_a_closed_backend_says_so(pretend):
    backend = pretend()
    state = two.run(backend=backend)
    backend.close()
    backend.close()
    with pytest.raises(sgl.BackendClosed):
        two.run(backend=backend)
    with pytest.raises(sgl.BackendClosed):
        state += "more"
    assert state["x"] == " yes"
    with pytest.raises(sgl.BackendClosed):
        backend.cache_prefix("text")


def test_a_finished_state_is_unchanged_when_the_backend_closes():
    class Slow(Pretend):
        async def end_program(self, program, branch):
            ended_programs.append(program)
            await asyncio.Event().wait()

    ended_programs = []
    with Slow() as backend:
        state = reads.run(backend=backend)
        wait_until(lambda: ended_programs)
    assert (state.error(), state.text(), state["x"]) == (None, "a yes", " yes")


def test_a_function_may_close_its_backend_once_it_has_read_all(pretend):
    @sgl.function
    def program(s):
        s += "a" + sgl.gen("x")
        s["x"]
        backend.shutdown()

    backend = pretend()
    state = program.run(backend=backend)
    assert (state.error(), state.text()) == (None, "a yes")


def test_a_closed_backend_has_no_threads():
    before = set(threading.enumerate())
    with Pretend() as backend:
        backend.loop.run(asyncio.to_thread(time.sleep, 0))
        asyncio.run(reads.arun(backend=backend))
    with pytest.raises(sgl.BackendClosed):
        asyncio.run(reads.arun(backend=backend))
    backend.program_pool.shutdown()
    assert set(threading.enumerate()) == before


def test_closing_a_backend_ends_what_runs_on_it(pretend):
    @sgl.function
    def program(s):
        s += "wait" + sgl.gen("x")
        threading.Thread(target=backend.close).start()
        return s["x"]

    backend = pretend(gates=["wait"])
    with pytest.raises(sgl.BackendClosed):
        program.run(backend=backend)


@pytest.fixture
def interruptible():
    """Make Ctrl-C raise KeyboardInterrupt even if a shell started the suite in the background, where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_a_program_that_waits(pretend, interruptible):
    @sgl.function
    def program(s):
        s += "wait" + sgl.gen("x")
        timer.start()
        return s["x"]

    backend = pretend(gates=["wait"])
    main = threading.get_ident()
    timer = threading.Timer(0.05, lambda: signal.pthread_kill(main, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        program.run(backend=backend)
    wait_until(lambda: backend.num_running == 0)


def test_an_error_in_a_batch_cancels_the_other_programs(pretend):
    @sgl.function
    def program(s, number):
        s += "wait" + sgl.gen("x")
        wait_until(lambda: number or backend.num_running == 3)
        return s["x"] if number else 1 // number

    backend = pretend(gates=["wait"])
    with pytest.raises(ZeroDivisionError):
        program.run_batch([(0,), (1,), (2,)], backend=backend)
    states = sgl.function(lambda s, i: s.__iadd__(f"{i}" + sgl.gen("x"))).run_batch(
        [(i,) for i in range(9)], generator_style=True, num_threads=1, backend=backend
    )
    next(states)
    states.close()
    assert len(backend.asked) < 3 + 9


def test_a_hint_that_fails_changes_nothing(pretend):
    class Forgetful(Pretend):
        async def end_program(self, program, branch):
            ended_programs.append(program)
            raise sgl.GenerationFailed("no such route")

    ended_programs = []
    with Forgetful() as backend:
        state = reads.run(backend=backend)
        wait_until(lambda: ended_programs)
        state += "more"
        assert state.error() is None and state.text().endswith("more")


def test_a_coroutine_that_is_cancelled_gives_up_its_program(pretend):
    backend = pretend(gates=["wait"])

    @sgl.function
    def program(s):
        s += "wait" + sgl.gen("x")
        return s["x"]

    async def cancelled():
        task = asyncio.ensure_future(program.arun(backend=backend))
        await until(lambda: backend.num_running)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    wait_until(lambda: backend.num_running == 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sgl.gen("x", stop_regex=5), "stop_regex must be Unicode text"),
        (lambda: sgl.gen("x", max_token=3), "did you mean 'max_tokens'"),
        (lambda: sgl.gen("x", regex="("), "regular expression"),
        (lambda: sgl.gen("x", regex="a", json_schema="{}"), "give one"),
        (lambda: sgl.gen("x", dtype=list), "dtype must be"),
        (lambda: sgl.gen("x", regex=b"a"), "regex must be Unicode text"),
        (lambda: sgl.gen("x", regex="a\ud800"), "regex must be Unicode text"),
        (lambda: sgl.gen("x", stop=["a", 5]), "stop must be"),
        (lambda: sgl.gen("x", stop_token_ids="a"), "stop_token_ids must be"),
        (lambda: sgl.gen("x", n="2"), "n must be a whole number"),
        (lambda: sgl.gen("x", n=True), "n must be a whole number"),
        (lambda: sgl.gen("x", temperature="hot"), "temperature must be a number"),
        (lambda: sgl.gen("x", ignore_eos=1), "ignore_eos must be True or False"),
        (lambda: sgl.gen("x", logprob_start_len=-5), "logprob_start_len"),
        (lambda: sgl.gen("x", json_schema="{"), "not valid JSON"),
        (lambda: sgl.gen("x", json_schema=dict), "must be a JSON schema"),
        (lambda: sgl.gen("x", json_schema={"const": float("nan")}), "not valid JSON"),
        (lambda: "a\ud800" + sgl.gen("x"), "Unicode"),
        (lambda: sgl.gen("x", choices=[]), "choices"),
        (lambda: sgl.gen("x", choices=["a"], regex="a"), "give one"),
        (lambda: sgl.gen("x", 5, choices=["a"]), "max_tokens has no effect"),
        (lambda: sgl.gen("x", choices=["a"], stop="b"), "stop has no effect"),
        (lambda: sgl.select("x", ["\ud800"]), "Unicode"),
        (lambda: sgl.select("x", ["a"], choices_method="mean"), "ChoicesSamplingMethod"),
        (lambda: sgl.select("x", []), "choices"),
        (lambda: sgl.select("x", "ab"), "choices"),
        (lambda: sgl.select("x", ["a", ""]), "choices"),
        (lambda: sgl.select("x", ["a"], temperature=1), "temperature"),
        (lambda: sgl.image("cat.png"), "text models only"),
        (lambda: sgl.video("cat.mp4", 3), "text models only"),
        (lambda: "a" + sgl.gen("x") + 3, "append text"),
        (lambda: sgl.function(lambda: None), "first argument"),
        (lambda: sgl.function(num_api_spec_tokens=0)(lambda s: None), "at least 1"),
    ],
)
def test_an_invalid_expression_is_an_error_where_it_is_constructed(make, message):
    with pytest.raises(RequestError, match=message):
        make()


@pytest.mark.parametrize(
    ("append", "message"),
    [
        (lambda s: s.__iadd__(None), "append text"),
        (lambda s: s.fork(0), "at least 1"),
        (lambda s: s.fork(2).__iadd__(["one"]), "2 forks"),
        (lambda s: s.fork(2, position_ids_offset=[1]), "position_ids_offset"),
        (lambda s: s.fork(2).__setitem__(0, s), "cannot be replaced"),
    ],
)
def test_appending_an_invalid_value_is_an_error_at_once(pretend, append, message):
    with pytest.raises(RequestError, match=message):
        sgl.function(append).run(backend=pretend())


@pytest.mark.parametrize(
    ("expr", "message"),
    [
        (sgl.user_begin() + sgl.assistant_begin(), "inside the user's"),
        (sgl.user_end(), "the open turn is none"),
        (sgl.gen("x", top_logprobs_num=2), "needs return_logprob=True"),
        (sgl.user_begin() + sgl.system_end(), "the open turn is user"),
    ],
)
def test_an_expression_that_is_invalid_in_its_place_is_an_error_of_the_state(pretend, expr, message):
    state = sgl.function(lambda s: s.__iadd__(expr)).run(backend=pretend())
    assert isinstance(state.error(), RequestError) and message in str(state.error())


def test_choices_of_a_gen_are_a_select():
    assert sgl.gen("x", choices=["a", "b"]) == sgl.select("x", ["a", "b"], choices_method=token_length_normalized)


@pytest.fixture(autouse=True)
def warnings_of_streams(caplog):
    caplog.set_level(logging.WARNING, "quire.lang")


def test_an_end_that_cannot_be_sent_at_exit_leaves_no_traceback(caplog):
    class Exiting(Pretend):
        async def end_program(self, program, branch):
            await super().end_program(program, branch)
            raise RuntimeError("cannot schedule new futures after shutdown")

    @sgl.function
    def program(s):
        s += sgl.gen("x")
        s["x"]  # so that the call announces more, and the end is sent apart

    with Exiting() as backend:
        program.run(backend=backend)
        wait_until(lambda: backend.ended_branches)
    gc.collect()
    assert "never retrieved" not in caplog.text
