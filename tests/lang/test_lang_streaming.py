"""Streams of a running program are complete, in order, and end."""

import asyncio

import pytest
from fake_lang_backend import Pretend

import quire.lang as sgl
from quire.errors import RequestError
from quire.lang.backends.backend import Piece

WORDS = " one two three"


@sgl.function
def program(s, mark="B"):
    s += "A" + sgl.gen("x") + mark + sgl.gen("y")


def test_the_text_comes_in_pieces(pretend):
    backend = pretend(lambda text, params: WORDS, gates=["A", "B"])
    state = program.run(stream=True, backend=backend)
    pieces = state.text_iter()
    assert next(pieces) == "A"
    backend.open("A")
    text = ""
    while text != f"{WORDS}B":
        text += next(pieces)
    backend.open("B")
    assert "".join(pieces) == WORDS
    assert state.text() == f"A{WORDS}B{WORDS}"


def test_a_variable_comes_in_pieces_and_ends_with_its_gen(pretend):
    backend = pretend(lambda text, params: WORDS, gates=["B"])
    state = program.run(stream=True, backend=backend)
    assert "".join(state.text_iter("x")) == WORDS
    assert list(state.var_iter("x")) == [WORDS]
    backend.open("B")
    assert "".join(state.text_iter("y")) == WORDS


def test_removed_reasoning_removes_no_other_text_of_a_stream():
    class Thinking(Pretend):
        async def generate(self, prompt, params, program, *, stream):
            yield Piece("<think>a thought</think>", {})
            await read.wait()
            yield Piece("\n\n42", {"finish_reason": {"type": "stop"}})

    @sgl.function
    def thinks(s):
        s += "A" + sgl.separate_reasoning(sgl.gen("x")) + " is what I think of it."

    for name, behind in ((None, " is what I think of it."), ("x", "")):
        read = asyncio.Event()
        with Thinking() as backend:
            state = thinks.run(stream=True, backend=backend)
            pieces = state.text_iter(name)
            seen = ""
            while "</think>" not in seen:
                seen += next(pieces)
            backend.loop.call_soon(read.set)
            assert "".join(pieces).lstrip() == "42" + behind
            assert state.text() == "A42 is what I think of it."


def test_a_list_of_sequences_comes_as_a_whole(pretend):
    @sgl.function
    def several(s):
        s += sgl.gen("x", n=2)

    async def read(state):
        return [piece async for piece in state.text_async_iter("x")]

    for stream in (True, False):
        state = several.run(stream=stream, backend=pretend(lambda text, params: [WORDS, "other"]))
        assert list(state.text_iter("x")) == asyncio.run(read(state)) == [[WORDS, "other"]]


def test_without_stream_there_is_one_piece(pretend):
    state = program.run(backend=pretend())
    assert list(state.text_iter()) == [state.text()]
    assert list(state.text_iter("x")) == [" yes"]


def test_a_stream_raises_an_error_after_the_text_before_it(pretend):
    boom = RequestError("no")
    answers = {"A": WORDS, "B": boom}
    state = program.run(stream=True, backend=pretend(lambda text, params: answers[text[-1]]))
    seen = []
    with pytest.raises(RequestError, match="no"):
        for piece in state.text_iter():
            seen.append(piece)
    assert "".join(seen) == f"A{WORDS}B"
    with pytest.raises(RequestError, match="no"):
        list(state.text_iter("y"))
    with pytest.raises(RequestError, match="no"):
        list(state.text_iter("unknown"))


def test_the_functions_own_error_is_the_streams(pretend):
    @sgl.function
    def wrong(s):
        s += "A" + sgl.gen("x")
        return s["x"] + 1

    state = wrong.run(stream=True, backend=pretend())
    with pytest.raises(TypeError):
        list(state.text_iter())
    assert isinstance(state.error(), TypeError)


def test_a_function_can_read_its_own_forks_while_they_write(pretend):
    @sgl.function
    def reader(s):
        s += "A"
        forks = s.fork(2)
        forks += lambda i: str(i) + sgl.gen("x")
        return ["".join(fork.text_iter()) for fork in forks]

    state = reader.run(stream=True, backend=pretend(lambda text, params: WORDS))
    "".join(state.text_iter())
    assert state.ret_value == [f"A0{WORDS}", f"A1{WORDS}"]


@pytest.mark.parametrize("stream", [True, False])
def test_coroutines_read_pieces_too(pretend, stream):
    state = program.run(stream=stream, backend=pretend(lambda text, params: WORDS))

    async def read():
        text = [piece async for piece in state.text_async_iter()]
        pairs = [pair async for pair in state.text_async_iter("x", return_meta_data=True)]
        return text, pairs

    text, pairs = asyncio.run(read())
    assert "".join(text) == state.text()
    assert "".join(piece for piece, _ in pairs) == state["x"]
    assert all(meta["prompt"] == "A" for _, meta in pairs)


def test_an_async_stream_raises_the_error_of_the_program(pretend):
    state = program.run(stream=True, backend=pretend(lambda text, params: RequestError("no")))

    async def read():
        return [piece async for piece in state.text_async_iter()]

    with pytest.raises(RequestError, match="no"):
        asyncio.run(read())
