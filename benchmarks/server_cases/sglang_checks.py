"""What SGLang's server tests (`test/srt/openai_server` and `/generate`) check, as checks of a server of quire.

The behaviours are SGLang's, the code is not. Where an answer depends on the model, the question is one that the
embedded model understands.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import openai

from benchmarks.server_cases.results import Case

MODEL = "quire-demo"
SYSTEM = {"role": "system", "content": "You are Pip."}
QUESTION = "How much is the lamp?"
ANSWER = "The lamp costs"  # its begin
STORY = "Write a story with Zoe and the shovel."
RECORD = "Faye took 18 white ladders on Thursday.\nJSON keys: count, name"
CITY = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": r"^\w+$"}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
_SECONDS = 60.0


class Server(NamedTuple):
    """A server of quire, with OpenAI's client and one for other routes."""

    openai: openai.OpenAI
    http: httpx.Client

    def post(self, path: str, body: object) -> Any:  # noqa: ANN401 (JSON)
        """The JSON of an answer with status 200."""
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def chat(self, text: str, **fields: Any) -> Any:  # noqa: ANN401 (of OpenAI's client)
        """A chat of one question; at temperature 0, unless a field says otherwise."""
        messages = [{"role": "user", "content": text}]
        return self.openai.chat.completions.create(**{"model": MODEL, "messages": messages, "temperature": 0, **fields})


Check = Callable[[Server], None]


def run(url: str) -> list[Case]:
    """The results of all checks, one after another, on the server at `url`."""
    cases = []
    with httpx.Client(base_url=url, timeout=_SECONDS) as http:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=_SECONDS)
        for name, check in CHECKS.items():
            file, _, case = name.partition("::")
            try:
                check(Server(client, http))
            except Exception as error:  # whatever a check meets is its result
                cases.append(Case(file, case, passed=False, message=f"{type(error).__name__}: {error}"))
            else:
                cases.append(Case(file, case, passed=True))
    return cases


def _completions(to: Server) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Requests of all 32 kinds, each with the numbers of its choices and of its prompt tokens."""
    prompt = "One Tuesday Mira went to the"
    ids = to.post("/tokenize", {"prompt": prompt})["tokens"]
    for echo, logprobs, several, n, as_ids in itertools.product((0, 1), (None, 5), (0, 1), (1, 2), (0, 1)):
        one = ids if as_ids else prompt
        body = {"model": MODEL, "prompt": [one, one] if several else one, "temperature": 0, "max_tokens": 32, "n": n}
        yield {**body, "echo": bool(echo), "logprobs": logprobs}, n * (1 + several), len(ids) * (1 + several)


def completion(to: Server) -> None:
    for body, num_choices, num_tokens in _completions(to):
        answer = to.openai.completions.create(**body)
        first = answer.choices[0]
        assert len(answer.choices) == num_choices
        assert not body["echo"] or first.text.startswith("One Tuesday Mira went to the")
        if body["logprobs"]:
            assert isinstance(first.logprobs.tokens[0], str) and first.logprobs.top_logprobs[1]
            assert body["echo"] or first.logprobs.token_logprobs[0] is not None
        assert answer.id and answer.created and answer.usage.completion_tokens > 0
        assert answer.usage.prompt_tokens == num_tokens


def completion_stream(to: Server) -> None:
    for body, num_choices, _ in _completions(to):
        texts: dict[int, str] = {}
        options = {"include_usage": True}
        for chunk in to.openai.completions.create(**body, stream=True, stream_options=options):
            assert chunk.id and chunk.created
            if chunk.usage is not None:
                assert chunk.usage.prompt_tokens > 0 and chunk.usage.completion_tokens > 0
                continue
            (choice,) = chunk.choices
            if body["logprobs"]:
                assert isinstance(choice.logprobs.tokens[0], str)
                is_first_of_prompt = body["echo"] and choice.index not in texts
                assert is_first_of_prompt or choice.logprobs.top_logprobs[0]
            texts[choice.index] = texts.get(choice.index, "") + choice.text
        assert sorted(texts) == list(range(num_choices))
        assert not body["echo"] or all(text.startswith("One Tuesday Mira") for text in texts.values())


def chat(to: Server) -> None:
    for top, n in itertools.product((None, 5), (1, 2)):
        answer = to.chat(QUESTION, logprobs=top is not None, top_logprobs=top, n=n)
        assert len(answer.choices) == n and answer.id and answer.created
        message = answer.choices[0].message
        assert message.role == "assistant" and isinstance(message.content, str)
        if top:
            assert len(answer.choices[0].logprobs.content[0].top_logprobs) == top
        assert answer.usage.prompt_tokens > 0 and answer.usage.completion_tokens > 0


def chat_stream(to: Server) -> None:
    for top, n in itertools.product((None, 5), (1, 2)):
        fields = {"stream": True, "stream_options": {"include_usage": True}, "n": n}
        began, ended = set(), []
        for chunk in to.chat(QUESTION, logprobs=top is not None, top_logprobs=top, **fields):
            if chunk.usage is not None:
                assert chunk.usage.prompt_tokens > 0 and chunk.usage.completion_tokens > 0
                continue
            (choice,) = chunk.choices
            if choice.index not in began:
                assert choice.delta.role == "assistant"
                began.add(choice.index)
                continue
            if choice.finish_reason is not None:
                ended.append(choice.index)
            elif top:
                assert len(choice.logprobs.content[0].top_logprobs) == top
            assert isinstance(choice.delta.content, str) or choice.finish_reason
        assert sorted(ended) == sorted(began) == list(range(n))


def regex(to: Server) -> None:
    pattern = '\\{\n   "name": "[\\w]+",\n   "count": [\\d]+\n\\}'
    fields = {"max_tokens": 128, "extra_body": {"regex": pattern}}
    record = json.loads(to.chat(QUESTION, **fields).choices[0].message.content)
    assert isinstance(record["name"], str) and isinstance(record["count"], int)


def penalty(to: Server) -> None:
    assert isinstance(to.chat(STORY, max_tokens=32, frequency_penalty=1.0).choices[0].message.content, str)


def response_prefill(to: Server) -> None:
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    answer = to.chat("", messages=messages, extra_body={"continue_final_message": True})
    assert answer.choices[0].message.content.startswith(" 22 coins")


def model_list(to: Server) -> None:
    (model,) = to.openai.models.list()
    assert isinstance(model.max_model_len, int)


def retrieve_model(to: Server) -> None:
    model = to.openai.models.retrieve(MODEL)
    assert model.id == model.root == MODEL
    try:
        to.openai.models.retrieve("another")
    except openai.NotFoundError:
        return
    raise AssertionError("another model was found")


def responses(to: Server) -> None:
    fields = {"model": MODEL, "input": QUESTION, "temperature": 0, "max_output_tokens": 32, "store": True}
    answer = to.openai.responses.create(**fields)
    assert answer.object == "response" and answer.id and answer.created_at and answer.error is None
    assert answer.status == "completed" and answer.usage.total_tokens > 0 and ANSWER in answer.output_text
    kinds = []
    with to.openai.responses.stream(**fields) as stream:
        kinds = [event.type for event in stream]
    assert {"response.created", "response.in_progress", "response.completed"} <= set(kinds)
    refused = to.http.post("/v1/responses", json={**fields, "previous_response_id": "bad"})
    assert refused.status_code in (400, 404) and {"message", "type", "code"} <= refused.json()["error"].keys()
    assert to.post("/v1/responses", {**fields, "frequency_penalty": 1.0})["object"] == "response"


def rerank(to: Server) -> None:
    documents = ["The lamp costs 22 coins a day.", "Zoe went to the forest."]
    for some in (documents[:1], documents):
        found = to.post("/v1/rerank", {"query": QUESTION, "documents": some})
        assert isinstance(found, list) and len(found) == len(some)
        for one in found:
            assert isinstance(one["score"], float) and isinstance(one["index"], int)
            assert isinstance(one["document"], str)


def score(to: Server) -> None:
    items = [" coins", " lamp", " day"]
    labels = [to.post("/tokenize", {"prompt": item})["tokens"][0] for item in items]
    body = {"model": MODEL, "query": "The lamp costs 22", "items": items, "label_token_ids": labels}
    scores = to.post("/v1/score", {**body, "apply_softmax": True})["scores"]
    assert len(scores) == len(items)
    for one in scores:
        assert len(one) == len(labels) and abs(sum(one) - 1) < 1e-6
    refused = to.http.post("/v1/score", json={**body, "label_token_ids": [999_999]})
    assert refused.status_code == 400 and "999999" in refused.text


def ebnf(to: Server) -> None:
    answer = to.chat("Say hello.", max_tokens=32, extra_body={"ebnf": 'root ::= "Hello" | "Hi" | "Hey"'})
    assert answer.choices[0].message.content in ("Hello", "Hi", "Hey")


def ebnf_strict_json(to: Server) -> None:
    grammar = r"""
    root ::= "{" pair "}"
    pair ::= "\"name\"" ":" text
    text ::= "\"" [A-Za-z]+ "\""
    """
    answer = to.chat("JSON keys: name", max_tokens=64, extra_body={"ebnf": grammar})
    assert re.fullmatch(r'\{"name":"[A-Za-z]+"\}', answer.choices[0].message.content)


def structural_tag(to: Server) -> None:
    tag = {"begin": "<city>", "schema": CITY, "end": "</city>"}
    format = {"type": "structural_tag", "structures": [tag], "triggers": ["<city>"]}
    assert to.chat(RECORD, max_tokens=64, response_format=format).choices[0].message.content


def structural_tag_constant(to: Server) -> None:
    answer = "The lamp costs a fish."
    format = {"type": "structural_tag", "format": {"type": "const_string", "value": answer}}
    assert to.chat(QUESTION, max_tokens=128, response_format=format).choices[0].message.content == answer


def structural_tag_schema(to: Server) -> None:
    format = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": CITY}}
    _check_city(to.chat(RECORD, max_tokens=128, response_format=format).choices[0].message.content)


def _check_city(text: str) -> None:
    record = json.loads(text)
    assert isinstance(record["name"], str) and isinstance(record["count"], int)


def _generate(to: Server, prompt: str, n: int = 1, **params: object) -> Any:  # noqa: ANN401 (JSON)
    """An answer of /generate to the body that SGLang's tests send."""
    sampling = {"temperature": 0 if n == 1 else 0.5, "max_new_tokens": 128, "n": n, "stop_token_ids": [1969], **params}
    nothing = {"stream": False, "return_logprob": False, "top_logprobs_num": 0, "logprob_start_len": 0}
    return to.post("/generate", {"text": prompt, "sampling_params": sampling, **nothing})


def json_constrained_generate(to: Server) -> None:
    _check_city(_generate(to, RECORD, json_schema=json.dumps(CITY))["text"])


def cache_report_generate(to: Server) -> None:
    before, again = (_generate(to, "_ The lamp costs")["meta_info"] for _ in range(2))
    assert before["cached_tokens"] < before["prompt_tokens"] - 1
    assert again["cached_tokens"] == again["prompt_tokens"] - 1


def cache_report_chat(to: Server) -> None:
    text = "Ledger:\n" + "\n".join(f"apple=Gus{number}" for number in range(30))
    before, again = (to.chat(text, max_tokens=10).usage for _ in range(2))
    assert before.prompt_tokens_details.cached_tokens < before.prompt_tokens / 2
    assert again.prompt_tokens_details.cached_tokens == again.prompt_tokens - 1


def cache_salt(to: Server) -> None:
    def cached(salt: str) -> int:
        usage = to.chat("How much is the kite?", max_tokens=10, extra_body={"cache_salt": salt}).usage
        return usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens

    first, second = cached("one"), cached("one")
    assert second == 1 < first
    assert cached("two") == first and cached("two") == 1


def continuous_usage(to: Server) -> None:
    for always in (True, False):
        options = {"include_usage": True, "continuous_usage_stats": always}
        chunks = list(to.chat(STORY, max_tokens=30, stream=True, stream_options=options))
        texts = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
        usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
        assert texts and (len(usages) >= len(texts) if always else len(usages) == 1)
        numbers = [usage.completion_tokens for usage in usages]
        assert numbers == sorted(numbers) and numbers[-1] > 0 and not chunks[-1].choices


def ignore_eos(to: Server) -> None:
    default, without = (
        to.chat(QUESTION, max_tokens=200, extra_body={"ignore_eos": ignored}) for ignored in (False, True)
    )
    assert without.usage.completion_tokens == 200 > default.usage.completion_tokens
    assert without.choices[0].finish_reason == "length"


def embeddings(to: Server) -> None:
    for given, count in (("Hello", 1), (["Hello", "lamp"], 2), (["Hello"], 1), ([[5, 6, 7]], 1), ([5, 6, 7], 1)):
        vectors = to.openai.embeddings.create(model=MODEL, input=given).data
        assert len(vectors) == count and all(len(one.embedding) > 0 for one in vectors)
    assert to.http.post("/v1/embeddings", json={"model": MODEL, "input": ""}).status_code == 400


def _tool(name: str, **properties: object) -> dict[str, object]:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": schema, "strict": True}}


PRICE = _tool("get_price", item={"type": "string"})
STOCK = _tool("get_stock", item={"type": "string", "enum": ["kite", "tent"]})
TASK = "Look up the price of the kite."


def _calls(to: Server, **fields: object) -> tuple[list[Any], list[Any]]:
    """The tool calls of an answer, and those of a stream's deltas."""
    whole = to.chat(TASK, max_tokens=400, **fields).choices[0].message.tool_calls
    deltas = [chunk.choices[0].delta for chunk in to.chat(TASK, max_tokens=400, stream=True, **fields)]
    return whole or [], [call for delta in deltas for call in delta.tool_calls or ()]


def tool_choice_auto(to: Server) -> None:
    whole, parts = _calls(to, tools=[PRICE, STOCK], tool_choice="auto")
    assert bool(whole) == bool(parts)


def tool_choice_required(to: Server) -> None:
    whole, parts = _calls(to, tools=[PRICE, STOCK], tool_choice="required")
    assert whole and parts


def tool_choice_named(to: Server) -> None:
    choice = {"type": "function", "function": {"name": "get_stock"}}
    whole, parts = _calls(to, tools=[PRICE, STOCK], tool_choice=choice)
    assert {call.function.name for call in whole} == {"get_stock"}
    assert {call.function.name for call in parts if call.function.name} == {"get_stock"}


def parallel_tool_calls(to: Server) -> None:
    text = "Look up the price of the kite, and the price of the tent. Call both tools."
    fields = {"tools": [PRICE, STOCK], "tool_choice": "required"}
    assert len(to.chat(text, **fields, parallel_tool_calls=False).choices[0].message.tool_calls) == 1
    assert len(to.chat(text, **fields).choices[0].message.tool_calls) == 2


def separate_reasoning(to: Server) -> None:
    def parts(**fields: object) -> tuple[str, str]:
        body = {"chat_template_kwargs": {"enable_thinking": True}, **fields}
        message = to.chat("Sum: 13 25 31", extra_body=body).choices[0].message
        deltas = [chunk.choices[0].delta for chunk in to.chat("Sum: 13 25 31", extra_body=body, stream=True)]
        reasoning = getattr(message, "reasoning_content", None) or ""
        assert reasoning == "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        assert message.content == "".join(delta.content or "" for delta in deltas)
        return reasoning, message.content

    apart, together = parts(separate_reasoning=True), parts(separate_reasoning=False)
    assert all(apart) and "<think>" not in apart[1]
    assert not together[0] and apart[0] in together[1]


def _stopped(to: Server, text: str, **fields: object) -> Iterator[tuple[str, object]]:
    """The finish reason and `matched_stop` of a completion and of a chat."""
    body = {"model": MODEL, "temperature": 0, "max_tokens": 300, **fields}
    yield _end(to.post("/v1/completions", {**body, "prompt": text}))
    yield _end(to.post("/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}))


def _end(answer: Any) -> tuple[str, object]:  # noqa: ANN401 (JSON)
    choice = answer["choices"][0]
    return choice["finish_reason"], choice["matched_stop"]


def matched_stop_text(to: Server) -> None:
    assert list(_stopped(to, STORY, stop=".")) == [("stop", ".")] * 2
    assert list(_stopped(to, STORY, max_tokens=5)) == [("length", None)] * 2


def matched_stop_end(to: Server) -> None:
    end = to.post("/tokenize", {"prompt": "<|im_end|>"})["tokens"][0]
    assert list(_stopped(to, QUESTION))[1] == ("stop", end)


def stop_regex(to: Server) -> None:
    assert list(_stopped(to, STORY, stop_regex="and|or|the")) == [("stop", "and|or|the")] * 2
    assert list(_stopped(to, STORY, stop_regex=r"[.!?]\s*$"))[1] == ("stop", r"[.!?]\s*$")


def prompt_too_long(to: Server) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello " * 2200}]}
    refused = to.http.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400
    assert "is longer than the model's context length" in refused.text


def max_tokens_too_large(to: Server) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4000}
    refused = to.http.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400
    assert "exceeds the model's maximum context" in refused.text


def generate(to: Server) -> None:
    prompts = ["One Tuesday Mira", "The lamp costs"]
    sampling = {"temperature": 0, "max_new_tokens": 8}
    body = {"text": prompts, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    answers = to.post("/generate", {**body, "top_logprobs_num": 2})
    assert len(answers) == 2
    for one in answers:
        about = one["meta_info"]
        assert len(about["input_token_logprobs"]) == about["prompt_tokens"]
        assert len(about["output_token_logprobs"]) == about["completion_tokens"]
        assert all(len(top) == 2 for top in about["output_top_logprobs"])
    several = to.post("/generate", {"text": prompts[0], "sampling_params": {"n": 3, "max_new_tokens": 8}})
    assert len(several) == 3
    body = {"text": prompts[0], "sampling_params": sampling, "stream": True}
    with to.http.stream("POST", "/generate", json=body) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]" and json.loads(events[-2])["text"] == answers[0]["text"]


def server_info(to: Server) -> None:
    info = to.http.get("/get_model_info").json()
    assert info["model_path"] == MODEL and info["is_generation"] is True
    assert to.http.get("/health_generate").status_code == 200


def session_params(to: Server) -> None:
    session = to.post("/open_session", {"capacity_of_str_len": 1000})
    body = {"text": "One Tuesday", "sampling_params": {"max_new_tokens": 4}, "session_params": {"id": session}}
    assert to.post("/generate", body)["text"]


CHECKS: dict[str, Check] = {
    "basic/test_openai_server::test_completion": completion,
    "basic/test_openai_server::test_completion_stream": completion_stream,
    "basic/test_openai_server::test_chat_completion": chat,
    "basic/test_openai_server::test_chat_completion_stream": chat_stream,
    "basic/test_openai_server::test_regex": regex,
    "basic/test_openai_server::test_penalty": penalty,
    "basic/test_openai_server::test_response_prefill": response_prefill,
    "basic/test_openai_server::test_model_list": model_list,
    "basic/test_openai_server::test_retrieve_model": retrieve_model,
    "basic/test_openai_server::TestOpenAIServerv1Responses": responses,
    "basic/test_openai_server::TestOpenAIV1Rerank": rerank,
    "basic/test_openai_server::TestOpenAIV1Score": score,
    "basic/test_openai_embedding::TestOpenAIEmbedding": embeddings,
    "features/test_openai_server_ebnf::test_ebnf": ebnf,
    "features/test_openai_server_ebnf::test_ebnf_strict_json": ebnf_strict_json,
    "features/test_structural_tag::legacy": structural_tag,
    "features/test_structural_tag::test_stag_constant_str_openai": structural_tag_constant,
    "features/test_structural_tag::test_stag_json_schema_openai": structural_tag_schema,
    "features/test_json_constrained::test_json_generate": json_constrained_generate,
    "features/test_cache_report::test_generate": cache_report_generate,
    "features/test_cache_report::test_cache_report_openai": cache_report_chat,
    "features/test_cache_report::test_cache_salt_effectiveness": cache_salt,
    "features/test_continuous_usage_stats::enabled_and_disabled": continuous_usage,
    "features/test_reasoning_content::separate_reasoning": separate_reasoning,
    "function_call/test_tool_choice::auto": tool_choice_auto,
    "function_call/test_tool_choice::required": tool_choice_required,
    "function_call/test_tool_choice::specific_function": tool_choice_named,
    "function_call/test_parallel_tool_calls::required": parallel_tool_calls,
    "validation/test_openai_server_ignore_eos::test_ignore_eos": ignore_eos,
    "validation/test_matched_stop::test_finish_stop_str": matched_stop_text,
    "validation/test_matched_stop::test_finish_stop_eos": matched_stop_end,
    "validation/test_matched_stop::test_finish_stop_regex_str": stop_regex,
    "validation/test_request_length_validation::test_input_length_longer_than_context_length": prompt_too_long,
    "validation/test_request_length_validation::test_max_tokens_validation": max_tokens_too_large,
    "test_srt_endpoint::generate": generate,
    "test_srt_endpoint::info_and_health": server_info,
    "test_session_control::session_params": session_params,
}
