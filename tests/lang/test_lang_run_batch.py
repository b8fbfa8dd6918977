"""Many runs of one program, on threads and from coroutines."""

import asyncio

import pytest
from fake_lang_backend import echo
from waiting import until

import quire.lang as sgl
from quire.errors import RequestError


@sgl.function
def greet(s, name, greeting="Hello"):
    s += greeting + " " + name + sgl.gen("reply") + "." + sgl.gen("more")


@pytest.mark.parametrize("num_threads", ["auto", 1, 3])
def test_a_batch_has_its_states_in_order(pretend, num_threads):
    backend = pretend(echo)
    names = [f"{'n' * i}" for i in range(12)]
    states = greet.run_batch([{"name": name} for name in names], num_threads=num_threads, backend=backend)
    assert [state.text() for state in states] == [greet.run(name, backend=backend).text() for name in names]
    assert greet.run_batch([], backend=backend) == []


def test_a_batch_takes_lists_of_arguments_and_refuses_what_does_not_fit(pretend):
    backend = pretend(echo)
    (state,) = greet.run_batch([("Ann", "Hi")], backend=backend)
    assert state.text().startswith("Hi Ann")
    for wrong in ([()], [("a", "b", "c")], ["Ann"]):
        with pytest.raises(RequestError, match="name, greeting"):
            greet.run_batch(wrong, backend=backend)
    for wrong in ([{"names": "Ann"}], [{}]):
        with pytest.raises(RequestError, match="must be a mapping or a list of name, greeting"):
            greet.run_batch(wrong, backend=backend)
    assert len(greet.bind(name="Ann").run_batch([{}], backend=backend)) == 1
    with pytest.raises(RequestError, match="a list of nothing"):
        sgl.function(lambda s: None).run_batch([["Ann"]], backend=backend)
    with pytest.raises(RequestError, match="num_threads"):
        greet.run_batch([("Ann",)], num_threads=0, backend=backend)


def test_a_batch_can_be_iterated_over_while_it_runs(pretend):
    backend = pretend(echo)
    states = greet.run_batch([(str(i),) for i in range(50)], generator_style=True, num_threads=2, backend=backend)
    assert next(states).text().startswith("Hello 0")
    assert len(backend.asked) < 40
    assert len(list(states)) == 49


def test_a_batch_shows_how_far_it_is(pretend, capsys):
    greet.run_batch([("Ann",), ("Bob",)], progress_bar=True, backend=pretend(echo))
    shown = capsys.readouterr()
    assert "greet" in shown.err and "2/2" in shown.err and not shown.out


def test_num_threads_bounds_how_many_programs_run(pretend):
    backend = pretend(echo)
    greet.run_batch([(str(i),) for i in range(20)], num_threads=2, backend=backend)
    assert backend.most_running <= 2


def test_coroutines_run_programs_too(pretend):
    backend = pretend(echo)

    async def both():
        return await asyncio.gather(greet.arun("Ann", backend=backend), greet.arun(name="Bob", backend=backend))

    assert [state.text() for state in asyncio.run(both())] == ["Hello Ann[9n].[14.]", "Hello Bob[9b].[14.]"]


def test_as_many_coroutines_run_programs_as_a_batch_does(pretend):
    backend = pretend(gates=["wait"])

    async def all_at_once():
        running = asyncio.gather(*(program.arun(backend=backend) for _ in range(40)))
        await until(lambda: backend.num_running == 40)
        backend.open("wait")
        return await running

    program = sgl.function(lambda s: s.__iadd__("wait" + sgl.gen("x")))
    assert [state["x"] for state in asyncio.run(asyncio.wait_for(all_at_once(), 60))] == [" yes"] * 40
