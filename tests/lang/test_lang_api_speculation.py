"""API speculation: fewer calls and the same text."""

import asyncio
import zlib

import pytest
from fake_lang_backend import Pretend
from hypothesis import example, given
from hypothesis import strategies as st

import quire.lang as sgl
from quire.errors import RequestError
from quire.lang.api_speculation import Completion, SpeculatedText, first_stop
from quire.lang.params import GenParams

ALPHABET = "ab\n;"
END = "$"


def next_letter(text):
    """A greedy model of letters: the next letter depends on the last four."""
    return (ALPHABET + ALPHABET + END)[zlib.crc32(text[-4:].encode()) % 9]


def written(text, params, *, offsets):
    """The answer of one call."""
    output = ""
    reason = "length"
    num_tokens = 0
    while num_tokens < params.max_tokens:
        num_tokens += 1
        letter = next_letter(text + output)
        if letter == END:
            reason = "stop"
            break
        output += letter
        stop = first_stop(output, params.stop)
        if stop is not None:
            output, reason = output[: stop[0]], "stop"
            break
    meta = {"finish_reason": {"type": reason}, "completion_tokens": num_tokens}
    if offsets and params.return_logprob:
        meta["token_offsets"] = list(range(len(output))) + [len(output)] * (num_tokens - len(output))
    return Completion(output, meta)


def run(program, num_tokens, *, offsets=True):
    """The text, the texts of gens, and the number of calls."""
    text, gens, calls = "", [], 0
    speculated = SpeculatedText(num_tokens)

    async def call(params):
        nonlocal calls
        calls += 1
        return written(text, params, offsets=offsets)

    for step in program:
        if isinstance(step, str):
            speculated.fill(step)
            text += step
        elif speculated.supports(step):
            gens.append(asyncio.run(speculated.generate(step, call)).text)
            text += gens[-1]
        else:
            speculated.clear()
            gens.append(asyncio.run(call(step)).text)
            text += gens[-1]
    return text, gens, calls


gens = st.builds(
    GenParams,
    max_tokens=st.integers(1, 12),
    stop=st.lists(st.sampled_from(["\n", ";", "b\n", "ab", "a;b"]), max_size=2).map(tuple),
    temperature=st.just(0.0),
)
programs = st.lists(st.one_of(gens, st.text(ALPHABET, min_size=1, max_size=3)), min_size=1, max_size=10)
LINE = GenParams(max_tokens=12, stop=("\n",), temperature=0.0)


@given(programs, st.integers(1, 40))
@example([LINE, "\n", LINE, "\n", LINE], 40)
def test_api_speculation_gives_the_text_of_separate_calls_with_no_more_calls(program, num_tokens):
    text, gens, calls = run(program, num_tokens)
    plain_text, plain_gens, plain_calls = run(program, None)
    assert (text, gens) == (plain_text, plain_gens)
    assert calls <= plain_calls


@given(programs, st.integers(1, 40))
def test_api_speculation_without_text_offsets_gives_the_same_text(program, num_tokens):
    assert run(program, num_tokens, offsets=False)[:2] == run(program, None)[:2]


def test_a_template_that_the_model_follows_takes_one_call():
    for seed in range(100):
        first = str(seed)
        lines = [first, *[LINE, "\n"] * 3]
        _, plain, _ = run(lines, None)
        if all(len(line) < 12 for line in plain) and END not in "".join(plain) and run(lines, 60)[2] == 1:
            return
    pytest.fail("no beginning leads to three lines")


@pytest.mark.parametrize(
    "said",
    [{"n": 2}, {"regex": "a"}, {"min_tokens": 2}, {"return_logprob": True}, {"presence_penalty": 1.0}, {"seed": 1}],
)
def test_gens_with_their_own_parameters_are_not_speculated(said):
    assert SpeculatedText(10).supports(GenParams()) and not SpeculatedText(None).supports(GenParams())
    assert not SpeculatedText(10).supports(GenParams(**said))


def test_speculated_text_is_not_used_for_other_sampling_parameters():
    program = ["x", LINE, "\n", GenParams(max_tokens=12, stop=("\n",), temperature=0.5)]
    assert run(program, 60)[2] == 2


def test_endpoints_that_refuse_logprobs_are_asked_without():
    speculated, asked = SpeculatedText(20), []

    async def call(params):
        asked.append(params.return_logprob)
        if params.return_logprob:
            raise RequestError("no logprobs here")
        return Completion("one;two", {"finish_reason": {"type": "stop"}, "completion_tokens": 3})

    params = GenParams(max_tokens=6, stop=(";",))
    assert asyncio.run(speculated.generate(params, call)).text == "one"
    speculated.fill("other")
    asyncio.run(speculated.generate(params, call))
    assert asked == [True, False, False]


# Whole chat turns


@sgl.function(num_api_spec_tokens=64)
def character(s, name):
    s += sgl.user(f"Describe {name}.")
    with s.assistant():
        s += "Name:" + sgl.gen("name", stop="\n") + "\nHouse:" + sgl.gen("house", stop="\n") + "\nEnd"
    s += sgl.user("Bye.")


def chat(*answers):
    left = iter(answers)
    return Pretend(lambda text, params: next(left), chat=True)


def test_a_chat_turn_is_written_in_one_call_and_read_by_its_pattern():
    with chat("Name: Ann\nHouse: red\nEnd and more") as backend:
        state = character.run("Ann", temperature=0, backend=backend)
        assert (state["name"], state["house"]) == (" Ann", " red")
        assert state.messages()[1]["content"] == "Name: Ann\nHouse: red\nEnd"
        (asked,) = backend.asked
        assert asked.params.max_tokens == 64 and asked.params.stop == ()
        assert asked.messages == ({"role": "user", "content": "Describe Ann."},)


@pytest.mark.parametrize(
    ("fixed", "stop", "sent"),
    [("Name:", ":", ()), ("Name:", ":\n", ()), ("Name:", "\n", ("\n",)), ("", ":", (":",)), ("Name", ":", (":",))],
)
def test_a_stop_that_could_end_a_turn_within_its_fixed_text_is_not_sent(fixed, stop, sent):
    @sgl.function(num_api_spec_tokens=64)
    def program(s):
        s += sgl.assistant(fixed + sgl.gen("x", stop=stop))

    with chat(f"{fixed} Ann{stop}more") as backend:
        assert program.run(temperature=0, backend=backend)["x"] == " Ann"
        (asked,) = backend.asked
        assert asked.params.stop == sent


def test_a_turn_that_does_not_fit_is_tried_again_where_tokens_are_drawn():
    with chat("Ann is", "Name: Ann\nHouse: red\nEnd") as backend:
        assert character.run("Ann", temperature=0.5, backend=backend)["house"] == " red"
    with chat("Ann is") as backend:
        error = character.run("Ann", temperature=0, backend=backend).error()
        assert isinstance(error, sgl.GenerationFailed) and "Ann is" in str(error)


def test_a_variable_of_a_turn_that_is_not_over_is_an_error_and_no_deadlock():
    @sgl.function(num_api_spec_tokens=64)
    def program(s):
        with s.assistant():
            s += sgl.gen("x", stop="\n")
            s += s["x"]

    with chat("one") as backend, pytest.raises(RequestError, match="turn ends"):
        program.run(backend=backend)


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        (sgl.gen("x") + sgl.gen("y"), "needs a stop"),
        (sgl.gen("x", stop=";") + sgl.gen("y", temperature=0.1), "equal sampling parameters"),
        (sgl.gen("x", regex="a"), "without n, regex"),
        (sgl.select("x", ["a"]), "select"),
    ],
)
def test_api_speculation_rejects_a_turn_that_one_call_cannot_write(inside, message):
    program = sgl.function(num_api_spec_tokens=64)(lambda s: s.__iadd__(sgl.assistant(inside)))
    with chat("one") as backend:
        assert message in str(program.run(backend=backend).error())
