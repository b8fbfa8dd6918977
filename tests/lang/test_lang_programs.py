"""Semantics of programs, for any order in which the loop runs their operations."""

import re
import subprocess
import sys
import threading

import pytest
from fake_lang_backend import Pretend, echo
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import wait_until

import quire.lang as sgl
from quire.errors import ConfigError, RequestError
from quire.lang.ir import REGEX_BOOL, REGEX_FLOAT, REGEX_INT, REGEX_STR


@sgl.function
def greet(s, name, greeting="Hello"):
    """Greets."""
    s += greeting + " " + name + sgl.gen("reply") + "." + sgl.gen("more")


def test_importing_the_language_does_not_import_torch():
    script = "import sys, quire.lang\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_text_and_generations_stand_in_the_order_in_which_they_were_appended(pretend):
    state = greet.run("Ann", backend=pretend(echo))
    assert state.text() == "Hello Ann[9n].[14.]"
    assert (state["reply"], state["more"]) == ("[9n]", "[14.]")
    assert state.get_meta_info("reply")["prompt"] == "Hello Ann"


def test_arguments_are_given_by_place_name_or_binding(pretend):
    backend = pretend(echo)
    bound = greet.bind(greeting="Hi")
    assert greet.run("Ann", "Hi", backend=backend).text() == bound.run(name="Ann", backend=backend).text()
    assert bound(name="Bob", backend=backend).text().startswith("Hi Bob")
    with pytest.raises(RequestError, match="did you mean 'greeting'"):
        greet.bind(greetings="Hi")
    with pytest.raises(RequestError, match="did you mean 'temperature'"):
        greet.run("Ann", temprature=1, backend=backend)


def test_defaults_of_a_run_hold_for_gens_that_say_nothing_else(pretend):
    @sgl.function
    def program(s):
        s += sgl.gen("x") + sgl.gen("y", max_tokens=3, temperature=0.5, stop="\n")

    backend = pretend()
    program.run(max_new_tokens=7, stop=["."], top_k=4, backend=backend)
    first, second = (asked.params for asked in backend.asked)
    assert (first.max_tokens, first.stop, first.temperature, first.top_k) == (7, (".",), 1.0, 4)
    assert (second.max_tokens, second.stop, second.temperature, second.top_k) == (3, ("\n",), 0.5, 4)


def test_dtypes_are_regular_expressions(pretend):
    @sgl.function
    def program(s):
        s += sgl.gen_int("a") + sgl.gen_string("b") + sgl.gen("c", dtype="bool") + sgl.gen("d", dtype=float, stop=";")

    backend = pretend()
    program.run(backend=backend)
    whole, text, truth, number = (asked.params for asked in backend.asked)
    assert whole.regex.startswith("[-+]?[0-9]+") and whole.stop == (" ", "\n")
    assert text.regex.startswith('"') and truth.regex == "(True|False)"
    assert number.stop == (";", " ", "\n")


def test_roles_are_turns_of_a_conversation(pretend):
    @sgl.function
    def program(s):
        s += sgl.system("Be kind.")
        s += s.user("Who?")
        with s.assistant():
            s += "It is" + sgl.gen("who")
        s += sgl.user_begin() + "And?" + sgl.user_end()

    state = program.run(backend=pretend(lambda text, params: " me"))
    assert state.messages() == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "It is me"},
        {"role": "user", "content": "And?"},
    ]
    assert state.text().startswith("<system>Be kind.</system>\n<user>Who?</user>\n<assistant>It is me</assistant>\n")


def test_a_scope_is_a_variable(pretend):
    @sgl.function
    def program(s):
        s += "a"
        with s.var_scope("all"):
            s += "b" + sgl.gen("x")
        s += "c"

    assert program.run(backend=pretend())["all"] == "b yes"


def test_of_scopes_with_one_name_the_inner_ends_first(pretend):
    @sgl.function
    def program(s):
        with s.var_scope("all"):
            s += "a"
            with s.var_scope("all"):
                s += "b"
            assert s["all"] == "b"

    assert program.run(backend=pretend())["all"] == "ab"


def test_turns_that_are_appended_already_add_up_to_nothing_more(pretend):
    @sgl.function
    def program(s):
        s += s.user("a") + s.assistant("b")
        s += s.user("c") + sgl.assistant("d")

    assert [one["content"] for one in program.run(backend=pretend()).messages()] == ["a", "b", "c", "d"]


def test_several_sequences_are_a_list_and_the_first_is_the_text(pretend):
    @sgl.function
    def program(s):
        s += "a" + sgl.gen("x", n=2) + "!"

    state = program.run(backend=pretend(lambda text, params: ["one", "two"]))
    assert (state["x"], state.text()) == (["one", "two"], "aone!")
    assert state.get_meta_info("x")["index"] == 0


def test_reasoning_is_taken_out_of_an_answer(pretend):
    @sgl.function
    def program(s):
        s += sgl.assistant(sgl.separate_reasoning(sgl.gen("x"), model_type="any")) + "."

    state = program.run(backend=pretend(lambda text, params: "<think>\nwhy\n</think>\n\n42"))
    assert (state["x"], state["x_reasoning_content"]) == ("42", "why")
    assert state.text() == "<assistant>42</assistant>\n."


def test_reasoning_is_taken_out_where_it_stands(pretend):
    @sgl.function
    def program(s):
        s += sgl.separate_reasoning(sgl.gen("x") + " and " + sgl.gen("y") + "!")

    state = program.run(backend=pretend(lambda text, params: f"<think>why</think>{len(text)}"))
    assert (state.text(), state["x"], state["y_reasoning_content"]) == ("0 and 6!", "0", "why")


def test_a_fork_begins_where_it_was_made(pretend):
    @sgl.function
    def program(s):
        s += "a" + sgl.gen("x")
        s["own"] = 1
        forks = s.fork(2)
        s["own"] = 2
        s += "later"
        forks += ["b", "c"]
        forks += sgl.gen("y")
        forks[1] += "d"
        return [fork.text() for fork in forks], [fork["own"] for fork in forks], forks[0]["x"]

    state = program.run(backend=pretend(lambda text, params: text.upper()))
    assert state.ret_value == (["aAbAAB", "aAcAACd"], [1, 1], "A")
    assert (state.text(), state["own"]) == ("aAlater", 2)


def test_a_join_makes_lists_of_what_is_new(pretend):
    @sgl.function
    def program(s):
        s += sgl.gen("old")
        forks = s.fork(3)
        forks += lambda i: str(i) + sgl.gen("new")
        forks[1]["rare"] = "x"
        forks += sgl.gen("old")
        forks.join()
        s += s["new"][2]

    state = program.run(backend=pretend(lambda text, params: text[-1:]))
    assert (state["new"], state["rare"], state["old"]) == (["0", "1", "2"], ["x"], "")
    assert state.text() == "2"


def test_a_join_can_append_what_was_written(pretend):
    @sgl.function
    def program(s):
        s += "a"
        forks = s.fork(2)
        forks += lambda i: str(i) + sgl.gen()
        forks.join("concate_and_append")
        s += "z"
        with s.copy() as copy:
            copy += "not this"

    assert program.run(backend=pretend(lambda text, params: "!")).text() == "a0!1!z"
    with pytest.raises(RequestError, match="gather_variable"):
        sgl.function(lambda s: s.fork(1).join("otherwise")).run(backend=pretend())


def test_forks_run_side_by_side_and_nothing_waits_that_need_not(pretend):
    @sgl.function
    def program(s):
        forks = s.fork(4)
        forks += "wait" + sgl.gen("x")
        s += "on" + sgl.gen("y")
        assert s["y"] == " yes"  # no fork has its variable yet
        wait_until(lambda: backend.num_running == 4)
        num_threads = threading.active_count()
        backend.open("wait")
        forks.join()
        return num_threads

    backend = pretend(gates=["wait"])
    num_threads = threading.active_count()
    state = program.run(backend=backend)
    assert state["x"] == [" yes"] * 4
    assert state.ret_value == num_threads  # a stream of operations is no thread


def test_a_program_that_reads_nothing_is_done_when_run_returns(pretend):
    @sgl.function
    def program(s):
        s += "a" + sgl.gen("x")
        s.fork(1)[0].__iadd__("b" + sgl.gen("y"))

    backend = pretend()
    program.run(backend=backend)
    assert [asked.text for asked in backend.asked] == ["a", "a yesb"]
    assert backend.num_running == 0


def test_whether_a_variable_is_known_does_not_depend_on_how_far_the_program_is(pretend):
    @sgl.function
    def program(s):
        s += "wait" + sgl.gen("x")
        forks = s.fork(1)
        forks[0]["y"] = 1
        forks.join()
        answers = "x" in s, "y" in s, "x" in forks[0], "z" in s
        backend.open("wait")
        return answers

    backend = pretend(gates=["wait"])
    assert program.run(backend=backend).ret_value == (True, True, True, False)


def test_meta_info_can_be_waited_for_a_while(pretend):
    @sgl.function
    def program(s):
        s += "wait" + sgl.gen("x")
        with pytest.raises(TimeoutError):
            s.get_meta_info("x", timeout=0.01)
        backend.open("wait")

    backend = pretend(gates=["wait"])
    assert program.run(backend=backend).error() is None


def test_the_default_backend_is_taken_where_none_is_given(pretend):
    with pytest.raises(ConfigError, match="set_default_backend"):
        greet.run("Ann")
    sgl.set_default_backend(pretend(echo))
    try:
        assert greet.run("Ann")["reply"] == "[9n]"
    finally:
        sgl.set_default_backend(None)


def test_program_hints_name_program_and_branch_of_each_call(pretend):
    @sgl.function
    def program(s):
        s += sgl.gen("x")
        forks = s.fork(2)
        forks += "wait" + sgl.gen("y")
        forks.join()
        backend.open("wait")

    backend = pretend(gates=["wait"])
    program.run(backend=backend)
    trunk, *branches = (asked.program for asked in backend.asked)
    assert (trunk.branch, [one.branch for one in branches]) == ("", ["1", "2"])
    assert {one.id for one in branches} == {trunk.id}
    wait_until(lambda: (trunk.id, None) in backend.ended_branches)
    for program_id, branch in backend.ended_branches:
        assert program_id == trunk.id and branch in (None, "1", "2")
    assert backend.ended_branches.count((trunk.id, None)) == 1


def test_no_program_hints_are_sent_when_hints_are_off(pretend):
    backend = pretend(hints=False)
    greet.run("Ann", backend=backend)
    assert [asked.program for asked in backend.asked] == [None, None]
    assert backend.ended_branches == []


# Random programs, against sequential execution.

texts = st.sampled_from(["a", "b ", "c\n"])
names = st.sampled_from(["x", "y"])
steps = st.recursive(
    st.one_of(
        st.tuples(st.just("text"), texts),
        st.tuples(st.just("gen"), names),
        st.tuples(st.just("read"), names),
        st.tuples(st.just("set"), names),
    ),
    lambda inner: st.tuples(
        st.sampled_from(["gather_variable", "concate_and_append"]),
        st.lists(st.lists(inner, max_size=4), min_size=1, max_size=3),
    ),
    max_leaves=12,
)


def run_lazily(s, program):
    for kind, what in program:
        match kind:
            case "text":
                s += what
            case "gen":
                s += sgl.gen(what)
            case "read":
                s += f"({s[what]})" if what in s else "()"
            case "set":
                s[what] = "set"
            case _:
                forks = s.fork(len(what))
                for fork, branch in zip(forks, what, strict=True):
                    run_lazily(fork, branch)
                forks.join(kind)


def run_eagerly(text, variables, program):
    for kind, what in program:
        match kind:
            case "text":
                text += what
            case "gen":
                variables[what] = echo(text, None)
                text += variables[what]
            case "read":
                text += f"({variables[what]})" if what in variables else "()"
            case "set":
                variables[what] = "set"
            case _:
                done = [run_eagerly(text, dict(variables), branch) for branch in what]
                if kind == "gather_variable":
                    for name in {name for _, own in done for name in own} - set(variables):
                        variables[name] = [own[name] for _, own in done if name in own]
                else:
                    text += "".join(own[len(text) :] for own, _ in done)
    return text, variables


def test_random_programs_write_what_they_would_write_one_step_at_a_time():
    with Pretend(echo) as backend:

        @settings(max_examples=60)
        @given(st.lists(steps, max_size=6))
        def check(program):
            state = sgl.function(lambda s: run_lazily(s, program)).run(backend=backend)
            text, variables = run_eagerly("", {}, program)
            assert state.text() == text
            assert {name: state[name] for name in variables} == variables

        check()


def test_the_names_that_programs_import_from_sglang_exist(pretend):
    for pattern, text in ((REGEX_INT, "-5"), (REGEX_FLOAT, "0.5"), (REGEX_BOOL, "True"), (REGEX_STR, '"a b"')):
        assert re.fullmatch(pattern, text)
    sgl.global_config.verbosity = 2
    sgl.global_config.enable_parallel_encoding = False
    backend = pretend()
    sgl.set_default_backend(backend)
    try:
        assert sgl.global_config.default_backend is backend
        assert sgl.function(lambda s: s.__iadd__(sgl.gen("x"))).run()["x"] == " yes"
    finally:
        sgl.set_default_backend(None)
    with pytest.raises(AttributeError):
        sgl.global_config.verbose = 1
