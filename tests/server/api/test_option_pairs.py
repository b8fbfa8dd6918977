"""Every pair of options in every dialect that has both, whole and streamed, with a model that says given messages.

What must come out is known from the parts of each message (tests/rigs/scripted_answers.py), so the same expectation has
these properties: a tool that is offered and not called changes no token and no character; streamed and whole answers
are equal; the reason of the end is the true one in the dialect's words; text of one channel is never in another; stop
strings end the answer and not the reasoning; there is a logprob for each token, and usage counts each token.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from itertools import combinations

import httpx
import pytest
from embedded_model_server import service_of
from example_budget import is_thorough, seed_of
from scripted_answers import TAGS, Channel, Part, Said, Stops, middle, say, tokens_of
from scripted_dialects import DIALECTS, Answer, Answers, Body, merged
from scripted_model import END, Script, ScriptedModel, write_scripted_model

from quire.config import EngineOptions
from quire.server.app import make_app
from quire.startup.build import build

RAW = ("completions", "sglang")  # dialects whose content is the whole text, with its markup
BLOCKS = ("responses", "messages")  # dialects whose content is apart where a call is between
PLAIN, JSON = "Yes: go-STOP-on|end.", '{"a": "go-STOP-on|end"}'
STOP, STOP_REGEX, STOP_TOKEN = "STOP", "S[T]OP", "|"
BUDGET = 10  # tokens
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
LONG = 400  # max_tokens where they do not matter


def _tools(dialect: str, **more: object) -> list[Body]:
    functions = [{"name": name, "parameters": SCHEMA, **more} for name in ("look", "send")]
    match dialect:
        case "responses":
            return [{"type": "function", **function} for function in functions]
        case "messages":
            return [{"name": one["name"], "input_schema": SCHEMA, **more} for one in functions]
    return [{"type": "function", "function": function} for function in functions]


@dataclass(frozen=True)
class Option:
    """An option of requests. feature: of its options a request has one. fields: by the dialects that have it."""

    name: str
    feature: str
    fields: Mapping[str, Body]


def _same(fields: Body, *dialects: str) -> dict[str, Body]:
    return dict.fromkeys(dialects, fields)


OPENAI = ("chat", "completions")
OLLAMA = ("ollama-chat", "ollama-generate")
NAMED = {"type": "function", "function": {"name": "look"}}
TOOLS = {dialect: {"tools": _tools(dialect)} for dialect in ("chat", "responses", "messages", "ollama-chat", "sglang")}
STRICT = {dialect: {"tools": _tools(dialect, strict=True)} for dialect in TOOLS}
OPTIONS = [
    Option("auto", "tools", TOOLS),
    Option("strict", "tools", STRICT),
    Option(
        "required",
        "tools",
        {
            **{dialect: {**TOOLS[dialect], "tool_choice": "required"} for dialect in ("chat", "responses", "sglang")},
            "messages": {**TOOLS["messages"], "tool_choice": {"type": "any"}},
        },
    ),
    Option(
        "named",
        "tools",
        {
            **{dialect: {**TOOLS[dialect], "tool_choice": NAMED} for dialect in ("chat", "sglang")},
            "responses": {**TOOLS["responses"], "tool_choice": {"type": "function", "name": "look"}},
            "messages": {**TOOLS["messages"], "tool_choice": {"type": "tool", "name": "look"}},
        },
    ),
    *(
        Option(
            name,  # on: the model writes the begin tag; begun: the prompt has it
            "reasoning",
            {
                "chat": {"enable_thinking": True},
                "responses": {"reasoning": {"effort": "high"}},
                "messages": {"thinking": {"type": "adaptive"}},
                **_same({"think": True}, *OLLAMA),
            },
        )
        for name in ("on", "begun")
    ),
    Option(
        "off",
        "reasoning",
        {
            "chat": {"enable_thinking": False},
            "responses": {"reasoning": {"effort": "none"}},
            "messages": {"thinking": {"type": "disabled"}},
            **_same({"think": False}, *OLLAMA),
        },
    ),
    Option(
        "budget",
        "reasoning",
        {
            **_same({"thinking_token_budget": BUDGET}, "chat", "responses"),
            "messages": {"thinking": {"type": "enabled", "budget_tokens": BUDGET}},
        },
    ),
    Option("bare", "reasoning", _same({}, "chat", "responses", "messages", *OLLAMA)),  # an end tag without a begin tag
    Option(
        "stop",
        "stop",
        {
            **_same({"stop": [STOP]}, *OPENAI, "responses"),
            "messages": {"stop_sequences": [STOP]},
            **_same({"options": {"stop": [STOP]}}, *OLLAMA),
            "sglang": {"sampling_params": {"stop": [STOP]}},
        },
    ),
    Option(
        "stop_regex",
        "stop",
        {**_same({"stop_regex": STOP_REGEX}, *OPENAI), "sglang": {"sampling_params": {"stop_regex": STOP_REGEX}}},
    ),
    Option(
        "stop_token_ids",
        "stop",
        {**_same({"stop_token_ids": None}, *OPENAI), "sglang": {"sampling_params": {"stop_token_ids": None}}},
    ),
    Option(
        "json",
        "constraint",
        {
            **_same(
                {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, *OPENAI
            ),
            "responses": {"text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
            "messages": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            **_same({"format": SCHEMA}, *OLLAMA),
            "sglang": {"sampling_params": {"json_schema": SCHEMA}},
        },
    ),
    Option(
        "regex",
        "constraint",
        {
            **_same({"structured_outputs": {"regex": "Yes: [a-zA-Z|-]+[.]"}}, *OPENAI),
            "sglang": {"sampling_params": {"regex": "Yes: [a-zA-Z|-]+[.]"}},
        },
    ),
    Option("max_tokens", "max_tokens", _same({}, *DIALECTS)),  # each message is cut in the middle of each channel
    Option(
        "logprobs",
        "logprobs",
        {
            "chat": {"logprobs": True, "top_logprobs": 1},
            "completions": {"logprobs": 1},
            "responses": {"include": ["message.output_text.logprobs"], "top_logprobs": 1},
            **_same({"logprobs": True, "top_logprobs": 1}, *OLLAMA),
            "sglang": {"return_logprob": True, "return_text_in_logprobs": True, "top_logprobs_num": 1},
        },
    ),
    Option("n", "n", {**_same({"n": 2}, *OPENAI), "sglang": {"sampling_params": {"n": 2}}}),
    Option("include_reasoning", "include_reasoning", {"chat": {"include_reasoning": False}}),
    Option("separate_reasoning", "separate_reasoning", {"chat": {"separate_reasoning": False}}),
]
PAIRS = [
    (dialect, first, second)
    for first, second in combinations(OPTIONS, 2)
    if first.feature != second.feature
    for dialect in DIALECTS
    if dialect in first.fields and dialect in second.fields
]
# Pairs that exclude each other, and the error.
ILLEGAL = {
    ("required", "regex"): "tool_choice requires a call, which excludes a constraint other than JSON",
    ("named", "regex"): "tool_choice requires a call, which excludes a constraint other than JSON",
}


@dataclass(frozen=True)
class Case:
    """A message that the model says under a pair of options. cut: the channel in whose middle max_tokens cuts it.

    parts: what is said, with the tokens that are forced. replaced: the texts that the model would say in place of parts
    that are forced.
    """

    name: str
    parts: tuple[Part, ...]
    opening: str = ""
    replaced: Mapping[Part, str] = field(default_factory=dict)
    cut: Channel | None = None

    @property
    def script(self) -> Script:
        """What the model would say."""
        return Script("".join(self.replaced.get(part, part.text) for part in self.parts), self.opening)


def _call(name: str = "look") -> list[Part]:
    begin = f'<tool_call>\n{{"name": "{name}", "arguments": '
    return [
        Part("call", begin, name),
        Part("arguments", JSON),
        Part("markup", "}\n</tool_call>"),
    ]


def _content(*texts: str) -> list[Part]:
    return [Part("content", text) for text in texts]


def _answers(features: Mapping[str, str], *, raw: bool) -> Iterator[tuple[str, list[Part]]]:
    """What the model says behind its reasoning, by name."""
    tools, constraint = features.get("tools"), features.get("constraint")
    if tools in ("required", "named"):
        yield "a call", _call()
        return
    yield "an answer", _content(JSON if constraint == "json" else PLAIN)
    if tools is not None and constraint == "json" and not raw:
        yield "a call", _call()
    if tools is None or constraint is not None:
        return
    yield (
        "a call between texts",
        [*_content("Hi."), Part("markup", "\n"), *_call(), Part("markup", "\n"), *_content("Bye.")],
    )
    yield "a call of another tool", _call("other")
    if not raw:
        yield "a tag in the text", _content("Use <tool_call> so.")


def _thoughts(features: Mapping[str, str], *, is_free: bool, whole_tags: bool) -> Iterator[tuple[str, Case]]:
    """What the model says before its answer, by name. is_free: whether nothing constrains the answer."""
    begin, end = Part("markup", "<think>\n"), Part("markup", "\n</think>\n\n")
    is_apart = "separate_reasoning" not in features
    thought = Part("reasoning", f"hm STOP{' <tool_call>' if is_apart else ''} so")
    match features.get("reasoning"):
        case "on":
            yield "thinks", Case("", (begin, thought, end))
        case "begun":
            yield "thinks", Case("", (thought, end), begin.text)
        case "budget":
            thought, forced = Part("reasoning", "hm STOP so"), Part("markup", "</think>")
            replaced = {forced: "#" * len(tokens_of(forced.text, whole_tags=whole_tags))}
            yield "is stopped", Case("", (thought, forced, Part("markup", "\n\n")), begin.text, replaced)
            yield "is brief", Case("", (Part("reasoning", "hm so"), end), begin.text)
            if is_free:
                rest = (Part("content", "and"), Part("markup", "\n</think>"), Part("content", "\n\n"))
                yield "ends again", Case("", (thought, forced, *rest), begin.text, replaced)
        case "bare" if is_free:
            yield "ends only", Case("", (*_content("hm-STOP-so"), Part("markup", "\n</think>"), *_content("\n\n")))
        case _:
            yield "", Case("", ())


def cases_of(dialect: str, options: Sequence[Option], *, whole_tags: bool) -> Iterator[Case]:
    """The messages that a model says under options."""
    features = {option.feature: option.name for option in options}
    raw = dialect in RAW
    is_free = features.get("tools") not in ("required", "named") and "constraint" not in features
    found = [
        replace(before, name=f"{thoughts} {name}".strip(), parts=(*before.parts, *answer))
        for thoughts, before in _thoughts(features, is_free=is_free, whole_tags=whole_tags)
        for name, answer in _answers(features, raw=raw)
    ]
    if is_free and features.get("reasoning") in ("on", "begun"):
        opening = "<think>\n" if features["reasoning"] == "begun" else ""
        begin = () if opening else (Part("markup", "<think>\n"),)
        found.append(Case("only thinks", (*begin, Part("reasoning", "hm STOP so")), opening))
    if is_free and raw:
        texts = _content("<think>\n", "hm STOP so", "\n</think>\n\n", PLAIN)
        found.append(Case("writes tags", tuple(texts)))
    for case in found:
        case = replace(case, parts=tuple(_as_content(case.parts, features, raw=raw)))
        if "max_tokens" not in features:
            yield case
            continue
        for cut in ("reasoning", "content", "arguments"):
            if any(part.channel == cut for part in case.parts):
                yield replace(case, name=f"{case.name}, cut in the {cut}", cut=cut)


def _as_content(parts: Iterable[Part], features: Mapping[str, str], *, raw: bool) -> Iterator[Part]:
    """The parts with those channels as content that the options or the dialect do not separate."""
    is_apart = not raw and "separate_reasoning" not in features
    for part in parts:
        is_of_reasoning = part.channel == "reasoning" or "think>" in part.text or part.text == "\n\n"
        if not is_apart and is_of_reasoning:
            yield replace(part, channel="content", shows_tags=not raw)
        else:
            yield part


def _is_complete(options: Sequence[Option], case: Case) -> bool:
    """Whether the constraint allows nothing behind the message, so that it ends without an end token."""
    names = {option.name for option in options}
    has_call = any(part.channel == "call" for part in case.parts)
    return "named" in names if has_call else bool(names & {"json", "regex"})


def stops_of(options: Sequence[Option], case: Case, *, whole_tags: bool) -> Stops:
    """What ends the message of a case."""
    names = {option.name for option in options}
    return Stops(
        text=STOP if "stop" in names else "",
        regex=STOP if "stop_regex" in names else "",
        token=STOP_TOKEN if "stop_token_ids" in names else "",
        max_tokens=None if case.cut is None else middle(case.parts, case.cut, whole_tags=whole_tags),
    )


def expected_answer(dialect: str, options: Sequence[Option], said: Said, model: ScriptedModel) -> Answers:
    """The answers in a dialect when a message was said."""
    names = {option.name for option in options}
    text = said.text("content", "markup", "call", "arguments") if dialect in RAW else "\n".join(said.blocks)
    ended = [END] if said.cause == "end" else []
    tokens = model.token_ids("".join([*said.tokens, *ended]))
    logprobs = (*said.tokens, *ended)
    if dialect == "responses":  # those of the text, see `_responses_whole`
        logprobs = tuple("".join(said.text("content").split()))
    answer = Answer(
        "" if "include_reasoning" in names else said.text("reasoning"),
        said.blocks if dialect in BLOCKS else tuple(filter(None, (text,))),
        tuple(_calls(dialect, said)) if any(option.feature == "tools" for option in options) else (),
        _end(dialect, said, model),
        tuple(tokens) if dialect in ("chat", *RAW) else None,
        logprobs if "logprobs" in names else () if dialect == "responses" else None,
    )
    count = 2 if "n" in names else 1
    return Answers((answer,) * count, len(tokens) * count)


def _calls(dialect: str, said: Said) -> Iterator[tuple[object, ...]]:
    """The calls as a dialect shows them."""
    for name, arguments in said.calls:
        is_cut = arguments != JSON
        match dialect:
            case "responses":
                yield (name, arguments, "incomplete" if is_cut else "completed")
            case "messages":
                yield (name, "{}" if is_cut else arguments)
            case "ollama-chat" if is_cut:
                pass
            case _:
                yield (name, arguments)


def _end(dialect: str, said: Said, model: ScriptedModel) -> object:
    """Why the answer ended, in the words of a dialect."""
    (end_id,), (stop_id,) = model.token_ids(END), model.token_ids(STOP_TOKEN)
    matched = {"text": STOP, "regex": STOP_REGEX, "token": stop_id}.get(said.cause)
    is_length, is_call = said.cause == "length", said.cause in ("end", "complete") and bool(said.calls)
    match dialect:
        case "responses" if is_length:
            return ("incomplete", "max_output_tokens")
        case "responses":
            return ("incomplete", "unfinished_call") if said.has_cut_call else ("completed", None)
        case "messages":
            reasons = {"length": "max_tokens", "text": "stop_sequence"}
            return (reasons.get(said.cause, "tool_use" if is_call else "end_turn"), matched)
        case "ollama-chat" | "ollama-generate":
            return "length" if is_length else "stop"
        case "sglang" if is_length:
            return {"type": "length", "length": said.num_tokens}
        case "sglang":
            return {"type": "stop", "matched": end_id if said.cause == "end" else matched}
    return ("tool_calls" if is_call and dialect == "chat" else "length" if is_length else "stop", matched)


class Server:
    """An app with a scripted model, called without a socket."""

    def __init__(self, model: ScriptedModel, client: httpx.AsyncClient, *, whole_tags: bool) -> None:
        self.model = model
        self.whole_tags = whole_tags
        self._client = client
        self._names = {script: name for name, script in model.scripts.items()}

    async def answer(self, dialect: str, options: Sequence[Option], case: Case, *, stream: bool) -> Answers | str:
        """The answers of a request; the error's message if it is refused."""
        spoken = DIALECTS[dialect]
        name = self._names[case.script]
        max_tokens = stops_of(options, case, whole_tags=self.whole_tags).max_tokens
        limit: object = LONG if max_tokens is None else max_tokens
        for name_of_limit in reversed(spoken.limit):
            limit = {name_of_limit: limit}
        stop_ids = self.model.token_ids(STOP_TOKEN)
        fields = [merged(option.fields[dialect]) for option in options]
        for one in fields:
            for place in (one, one.get("sampling_params", {})):
                if "stop_token_ids" in place:
                    place["stop_token_ids"] = stop_ids
        body = merged(spoken.body(name, self.model.prompt(name)), limit, *fields, {"stream": stream})
        if stream:
            body |= spoken.stream_fields
        response = await self._client.post(spoken.path, json=body)
        if response.status_code != 200:
            return response.text
        return spoken.streamed(response.text) if stream else spoken.whole(response.json())


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[tuple[asyncio.Runner, list[Server]]]:
    """Servers with the same scripts, whose tags are bytes and special tokens, and the loop on which they run."""
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            folder = tmp_path_factory.mktemp("scripted")
            yield runner, [runner.run(_start(folder, stack, whole_tags=whole_tags)) for whole_tags in (False, True)]
        finally:
            runner.run(stack.aclose())


async def _start(folder, stack: AsyncExitStack, *, whole_tags: bool) -> Server:
    scripts = {
        case.script: None for dialect, *options in PAIRS for case in cases_of(dialect, options, whole_tags=whole_tags)
    }
    model = write_scripted_model(
        folder / f"{whole_tags}",
        {f"script {place}": script for place, script in enumerate(scripts)},
        markup=TAGS,
        special=TAGS if whole_tags else (),
        without_reasoning="<think>\n\n</think>\n\n",
    )
    options = EngineOptions(model=str(model.folder), max_num_seqs=32, memory="256MiB", dtype="float32")
    built = build(options, report=lambda line: None, progress=lambda done, total: None)
    app = make_app(service_of(built))
    await stack.enter_async_context(app.router.lifespan_context(app))
    transport = httpx.ASGITransport(app)
    client = httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60)
    return Server(model, await stack.enter_async_context(client), whole_tags=whole_tags)


@pytest.mark.parametrize(
    ("dialect", "first", "second"),
    PAIRS,
    ids=[f"{dialect}-{first.name}-{second.name}" for dialect, first, second in PAIRS],
)
def test_a_pair_of_options_gives_what_the_model_says(servers, pytestconfig, dialect, first, second):
    runner, used = servers
    if not is_thorough():  # half of the pairs with tags that are bytes, the others with special tokens
        place = PAIRS.index((dialect, first, second)) + seed_of(pytestconfig)
        used = [used[place % len(used)]]
    options = (first, second)
    error = ILLEGAL.get((first.name, second.name))
    asked = [
        (server, case, stream)
        for server in used
        for case in cases_of(dialect, options, whole_tags=server.whole_tags)
        for stream in (False, True)
    ]

    async def run() -> list[Answers | str]:
        calls = [server.answer(dialect, options, case, stream=stream) for server, case, stream in asked]
        return await asyncio.gather(*calls)

    wrong: list[str] = []
    before: Answers | str = ""  # the whole answer before a streamed one
    for (server, case, stream), answers in zip(asked, runner.run(run()), strict=True):
        said = say(case.parts, stops_of(options, case, whole_tags=server.whole_tags), whole_tags=server.whole_tags)
        if said.cause == "end" and _is_complete(options, case):
            said = replace(said, cause="complete")
        expected = expected_answer(dialect, options, said, server.model)
        about = (
            f"{case.name}, {'streamed' if stream else 'whole'}, {'special tokens' if server.whole_tags else 'bytes'}"
        )
        if error is not None:
            assert error in str(answers), about
        elif answers != expected:
            wrong.append(f"{about}:\n{_difference(expected, answers)}")
        elif stream and answers.num_reasoning != before.num_reasoning:
            wrong.append(f"{about}: tokens of reasoning {answers.num_reasoning}, whole {before.num_reasoning}")
        before = answers
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)


def _difference(expected: Answers, answers: Answers | str) -> str:
    """The fields of the first choice that differ."""
    if isinstance(answers, str) or len(answers.choices) != len(expected.choices):
        return f"  {answers}"
    fields = [
        (name, getattr(expected.choices[0], name), getattr(answers.choices[0], name))
        for name in Answer.__dataclass_fields__
    ]
    fields.append(("num_tokens", expected.num_tokens, answers.num_tokens))
    return "\n".join(f"  {name}: {one!r}\n  {' ' * len(name)}  {two!r}" for name, one, two in fields if one != two)
