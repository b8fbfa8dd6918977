"""A program gives the same result on an engine, on a server, and on an endpoint with OpenAI's API."""

import json
import re
import shutil
from random import Random

import pytest
from fake_lang_backend import Pretend

import quire.lang as sgl
from quire.errors import RequestError
from quire.hub import embedded
from quire.lang.backends.http import Http
from quire.lang.backends.roles import TemplateRoles
from quire.lang.event_loop import LoopThread
from quire.tokenizer.tokenizer import Tokenizer
from tools.demo_model.tool_use import TOOLS


@sgl.function
def chat(s, item):
    s += sgl.system("You are Pip.")
    s += sgl.user(f"How much is the {item}?")
    s += sgl.assistant(sgl.gen("price", max_tokens=24))
    s += sgl.user("Who keeps it?")
    s += sgl.assistant(sgl.gen("keeper", max_tokens=24, stop="."))


@sgl.function
def plain(s):
    s += "One Tuesday Mira went to" + sgl.gen("where", max_tokens=12, stop=[".", ","])
    forks = s.fork(2)
    forks += lambda i: [". Then", ". She"][i] + sgl.gen("then", max_tokens=8)
    forks.join()
    s += sgl.gen("two", n=2, max_tokens=3)


@pytest.fixture(scope="module")
def completions(url):
    with sgl.OpenAI("quire-demo", is_chat_model=False, base_url=f"{url}/v1", extensions=True) as backend:
        yield backend


@pytest.fixture(scope="module")
def chats(url):
    with sgl.OpenAI(is_chat_model=True, base_url=f"{url}/v1") as backend:
        yield backend


def test_programs_write_the_same_on_all_backends(engine, endpoint, completions):
    first, *others = [plain.run(temperature=0, backend=backend) for backend in (engine, endpoint, completions)]
    for state in others:
        assert state.text() == first.text()
        assert [state[name] for name in ("where", "then", "two")] == [first[name] for name in ("where", "then", "two")]
    assert len(first["two"]) == 2


def test_streams_have_the_same_text_on_all_backends(engine, endpoint, completions):
    for backend in (engine, endpoint, completions):
        state = plain.run(temperature=0, stream=True, backend=backend)
        assert "".join(state.text_iter()) == state.text() == plain.run(temperature=0, backend=engine).text()


def test_conversations_are_as_the_template_writes_them(engine, endpoint, chats):
    first, second, third = [chat.run("lantern", temperature=0, backend=one) for one in (engine, endpoint, chats)]
    assert first.text() == second.text()
    assert first.messages() == second.messages() == third.messages()
    assert first["price"] == "The lantern costs 11 coins a day."
    template = Tokenizer.from_folder(embedded.folder())
    assert first.text() == template.apply_chat_template(first.messages(), add_generation_prompt=False)


def test_meta_info_of_a_variable_is_equal_on_engine_and_endpoint(engine, endpoint):
    @sgl.function
    def program(s):
        s += "The lantern" + sgl.gen(
            "x",
            max_tokens=4,
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=2,
            return_text_in_logprobs=True,
        )

    meta_info = [program.run(temperature=0, backend=one).get_meta_info("x") for one in (engine, endpoint)]
    for name in ("prompt_tokens", "completion_tokens", "finish_reason"):
        assert meta_info[0][name] == meta_info[1][name]
    for name in ("input_token_logprobs", "output_token_logprobs"):
        pairs = list(zip(meta_info[0][name], meta_info[1][name], strict=True))
        assert pairs
        for one, other in pairs:
            assert list(one[1:]) == other[1:] and one[0] == pytest.approx(other[0], abs=1e-3)
    assert [len(row) for row in meta_info[0]["output_top_logprobs"]] == [2] * 4


def test_forms_are_kept_on_all_backends(engine, endpoint, completions):
    @sgl.function
    def program(s, kind):
        s += "Numbers: " + sgl.gen("x", max_tokens=20, **kind)

    schema = {"type": "object", "properties": {"n": {"enum": [7, 8]}}, "required": ["n"], "additionalProperties": False}
    for backend in (engine, endpoint, completions):
        number = program.run({"regex": "[0-9]{3}-[0-9]{2}"}, temperature=0, backend=backend)
        assert re.fullmatch("[0-9]{3}-[0-9]{2}", number["x"])
        value = program.run({"json_schema": schema}, temperature=0, backend=backend)
        assert json.loads(value["x"])["n"] in (7, 8)
        if backend is engine:
            forced = value.get_meta_info("x")["forced_tokens"]
        elif backend is endpoint:
            assert value.get_meta_info("x")["forced_tokens"] == forced
        whole = program.run({"dtype": int}, temperature=0, backend=backend)
        assert re.fullmatch("[-+]?[0-9]+", whole["x"].strip())
        bad = program.run({"json_schema": '{"type": "nonsense"}'}, backend=backend)
        assert isinstance(bad.error(), RequestError)


def test_calls_and_tokens_are_counted(engine, endpoint, completions):
    for backend in (engine, endpoint, completions):
        before = (backend.stats.num_calls, backend.stats.prompt_tokens, backend.stats.completion_tokens)
        state = plain.run(temperature=0, backend=backend)
        assert backend.stats.num_calls - before[0] == 4
        meta_info = state.get_meta_info("where")
        assert backend.stats.prompt_tokens - before[1] > meta_info["prompt_tokens"]
        assert backend.stats.completion_tokens - before[2] >= meta_info["completion_tokens"] + 2 * 3


def test_an_endpoint_without_extensions_refuses_what_the_api_does_not_have(url):
    with sgl.OpenAI("quire-demo", is_chat_model=False, base_url=f"{url}/v1") as backend:
        for said in ({"top_k": 3}, {"regex": "a"}, {"ignore_eos": True}, {"prediction": "a"}):
            state = sgl.function(lambda s, said=said: s.__iadd__("a" + sgl.gen("x", **said))).run(backend=backend)
            assert "extensions=True" in str(state.error())


def test_a_prediction_changes_no_text(engine, endpoint, completions, chats):
    @sgl.function
    def program(s, prediction):
        s += "One Tuesday Mira went to" + sgl.gen("where", max_tokens=24, prediction=prediction)

    for backend in (engine, endpoint, completions):
        plain = program.run(None, temperature=0, backend=backend)
        assert program.run(plain["where"], temperature=0, backend=backend)["where"] == plain["where"]
        assert program.run("the moon", temperature=0, backend=backend)["where"] == plain["where"]

    @sgl.function
    def answered(s, prediction):
        s += sgl.user("How much is the lantern?")
        s += sgl.assistant(sgl.gen("price", max_tokens=24, prediction=prediction))

    plain = answered.run(None, temperature=0, backend=chats)
    known = answered.run(plain["price"], temperature=0, backend=chats)
    assert known["price"] == plain["price"]


def test_a_prediction_is_sent_as_each_api_has_it(endpoint, completions, chats, monkeypatch):
    sent, post = [], Http.post

    async def posting(self, path, body):
        sent.append(body)
        return await post(self, path, body)

    monkeypatch.setattr(Http, "post", posting)
    program = sgl.function(lambda s: s.__iadd__("a" + sgl.gen("x", max_tokens=2, prediction="b")))
    answered = sgl.function(lambda s: s.__iadd__(sgl.user("a") + sgl.assistant(sgl.gen("x", prediction="b"))))
    for ask, backend in ((program, endpoint), (program, completions), (answered, chats)):
        assert ask.run(backend=backend).error() is None
    asked = [body.get("sampling_params", body).get("prediction") for body in sent]
    theirs = {"type": "content", "content": "b"}
    assert [one for one in asked if one is not None] == ["b", theirs, theirs]


def test_a_prediction_that_is_no_text_is_refused():
    with pytest.raises(RequestError, match="prediction must be Unicode text"):
        sgl.gen("x", prediction=3)


def test_a_chat_endpoint_needs_gens_that_begin_a_turn(chats, url):
    @sgl.function
    def program(s):
        s += sgl.user("How much is the lantern?")
        s += sgl.assistant("The lantern" + sgl.gen("x", max_tokens=16))
        s += sgl.user("Sort: b a") + sgl.assistant(sgl.select("y", ["yes", "no"]))

    assert "num_api_spec_tokens" in str(program.run(backend=chats).error())
    with sgl.OpenAI("quire-demo", base_url=f"{url}/v1", extensions=True) as backend:
        state = program.run(temperature=0, backend=backend)
        assert state["x"] == " costs 11 coins a day."
        assert state["y"] in ("yes", "no")


LINES = sgl.function(num_api_spec_tokens=100)(
    lambda s, first: s.__iadd__(
        f"<|im_start|>user\nSum: {first} /think<|im_end|>\n<|im_start|>assistant\n<think>\n"
        + sgl.gen("one", stop="\n", max_tokens=40)
        + "\n"
        + sgl.gen("two", stop="\n", max_tokens=40)
        + "\n</think>\n\n"
        + sgl.gen("sum", max_tokens=8)
    )
)


def test_api_speculation_writes_the_same_with_fewer_calls(completions):
    without = sgl.function(LINES.func)
    expected = without.run("5 17 8", temperature=0, backend=completions)
    before = completions.stats.num_calls
    state = LINES.run("5 17 8", temperature=0, backend=completions)
    assert state.text() == expected.text()
    assert (state["two"], state["sum"]) == ("22+08: 2+8=10, 2+0+1=3, so 30", "30")
    assert completions.stats.num_calls - before == 1


def test_api_speculation_needs_no_more_calls_where_the_text_is_streamed(completions):
    @sgl.function(num_api_spec_tokens=100)
    def program(s):
        s += "How much is the rope?\nThe rope costs " + sgl.gen("one", max_tokens=3, stop="\n")
        s += "\nB:" + sgl.gen("two", max_tokens=8, stop="\n")

    calls = []
    for stream in (False, True):
        before = completions.token_usage.num_calls
        state = program.run(temperature=0, stream=stream, backend=completions)
        assert "".join(state.text_iter()) == state.text()
        calls.append(completions.token_usage.num_calls - before)
        assert state.get_meta_info("one")["finish_reason"] == {"type": "length", "length": 3}
    assert calls == [2, 2]


def test_api_speculation_writes_a_chat_turn_in_one_call(url):
    @sgl.function(num_api_spec_tokens=64)
    def program(s):
        s += sgl.user("Sum: 5 17 8 /think")
        with s.assistant():
            s += "<think>\n" + sgl.gen("one", stop="\n") + "\n" + sgl.gen("two", stop="\n") + "\n</think>\n\n"
            s += sgl.gen("sum")

    with sgl.OpenAI("quire-demo", base_url=f"{url}/v1", extensions=True) as backend:
        state = program.run(temperature=0, backend=backend)
        assert (state["one"], state["sum"]) == ("05+17: 5+7=12, 0+1+1=2, so 22", "30")
        assert backend.stats.num_calls == 1


def test_token_usage_can_be_reset(completions):
    sgl.function(lambda s: s.__iadd__("One" + sgl.gen(max_tokens=1))).run(backend=completions)
    assert completions.token_usage.completion_tokens > 0
    completions.token_usage.reset()
    assert (completions.token_usage.prompt_tokens, completions.token_usage.completion_tokens) == (0, 0)


@pytest.mark.parametrize("name", ["engine", "endpoint", "completions"])
def test_logprobs_without_a_token_of_output(name, request):
    program = sgl.function(lambda s: s.__iadd__("One Tuesday Mira" + sgl.gen("x", max_tokens=0, return_logprob=True)))
    state = program.run(temperature=0, backend=request.getfixturevalue(name))
    assert state["x"] == ""
    assert state.get_meta_info("x")["finish_reason"]["type"] == "length"


# Templates

TEMPLATES = {
    "chatml": "".join(
        [
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        ]
    ),
    "default system": "".join(
        [
            "{% if messages[0].role != 'system' %}[SYS]Be kind.[/SYS]{% endif %}",
            "{% for m in messages %}[{{ m.role }}]{{ m.content }}[/]{% endfor %}",
            "{% if add_generation_prompt %}[assistant]{% endif %}",
        ]
    ),
    "system inside the user's turn": "".join(
        [
            "<bos>{% set s = messages[0].content if messages[0].role == 'system' else '' %}",
            "{% for m in messages if m.role != 'system' %}<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n",
            "{% if loop.first and s %}{{ s }}\n\n{% endif %}{{ m.content | trim }}</turn>\n{% endfor %}",
            "{% if add_generation_prompt %}<turn>model\n{% endif %}",
        ]
    ),
    "thoughts": "".join(
        [
            "{% for m in messages %}<{{ m.role }}>",
            "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}",
            "{{ m.content }}<end>{% endfor %}",
            "{% if add_generation_prompt %}<assistant>{% endif %}",
        ]
    ),
}


@pytest.mark.parametrize("with_system", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_turns_are_written_as_the_template_writes_the_whole_conversation(name, with_system, tmp_path):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded.folder() / file, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[name])
    tokenizer = Tokenizer.from_folder(tmp_path)

    async def render(messages, *, add_generation_prompt):
        return tokenizer.apply_chat_template(messages, None, add_generation_prompt)

    class Templated(Pretend):
        async def role_texts(self, roles):
            return await templates.texts(roles)

    templates = TemplateRoles(render)

    @sgl.function
    def program(s):
        if with_system:
            s += sgl.system("SYSTEM")
        s += sgl.user("FIRST") + sgl.assistant(sgl.gen("a")) + sgl.user("SECOND") + sgl.assistant_begin()

    with Templated(lambda text, params: "ANSWER") as backend:
        state = program.run(backend=backend)
        assert state.text() == tokenizer.apply_chat_template(state.messages(), add_generation_prompt=True)


# HTTP


def test_an_unreachable_endpoint_is_an_error_that_names_the_address():
    with pytest.raises(sgl.GenerationFailed, match=r"http://127\.0\.0\.1:9"):
        sgl.RuntimeEndpoint("http://127.0.0.1:9")


def test_an_error_response_of_a_server_is_a_request_error_that_names_the_field(endpoint):
    @sgl.function
    def program(s):
        s += "a" + sgl.gen("x", temperature=1e9)

    error = program.run(backend=endpoint).error()
    assert isinstance(error, RequestError) and error.param == "temperature"


def test_a_busy_server_is_asked_again_and_a_broken_one_is_not():
    httpx2 = pytest.importorskip("httpx2")
    answers = [(429, {"retry-after": "0"}, ""), (503, {"retry-after": "0"}, ""), (200, {}, '{"fine": 1}')]
    answers += [(500, {}, '{"error": {"message": "broken"}}'), (200, {}, "not json")]
    left = iter(answers)

    def answer(request):
        status, headers, text = next(left)
        return httpx2.Response(status, headers=headers, text=text)

    loop = LoopThread()
    http = Http("http://server", None, transport=httpx2.MockTransport(answer))
    try:
        assert loop.run(http.get("/x")) == {"fine": 1}
        with pytest.raises(sgl.GenerationFailed, match="500: broken"):
            loop.run(http.post("/x", {}))
        with pytest.raises(sgl.GenerationFailed, match="not JSON"):
            loop.run(http.post("/x", {}))
    finally:
        loop.close(http.close)


@sgl.function
def agent(s, question, tools, tool_choice):
    s += sgl.system("Tools:\n" + "\n".join(map(json.dumps, tools)))
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("call", max_tokens=80, temperature=0, tools=tools, tool_choice=tool_choice))


@pytest.mark.parametrize("tool_choice", ["auto", "required"])
def test_a_gen_with_tools_calls_one(engine, endpoint, completions, tool_choice):
    tool, make = TOOLS["get_price"]
    use = make(Random(1))
    for backend in (engine, endpoint):
        state = agent.run(use.question, [tool], tool_choice, backend=backend)
        (call,) = state.get_meta_info("call")["tool_calls"]
        assert (call["name"], json.loads(call["arguments"])) == ("get_price", use.arguments)
        assert "get_price" in state["call"], "the text stays as it was generated"
    with pytest.raises(RequestError, match="needs a quire engine"):
        agent.run(use.question, [tool], tool_choice, backend=completions)["call"]
