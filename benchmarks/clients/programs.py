"""One small program per client, run by the interpreter of an environment that has the client.

    python -m benchmarks.clients.programs CLIENT URL

Prints the versions of the client's packages, then one line of JSON per check: its name and null, or the error's
message. The clients for Node have programs of the same form beside this one.
"""

# ruff: noqa: PLC0415 (an environment may lack the other clients)

import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from importlib.metadata import version
from typing import Any

from benchmarks.clients.frameworks import instructor, langchain, llama_index, openai_agents, pydantic_ai
from benchmarks.clients.huggingface import huggingface_hub, text_generation
from benchmarks.clients.questions import (
    FACTS,
    MODEL,
    MORE,
    PRICE,
    QUESTION,
    SUM,
    TASK,
    Checks,
    Record,
    Shop,
    call_and_answer,
    some,
    tool,
    user,
)

PACKAGES: Mapping[str, tuple[str, ...]] = {  # client -> what is installed for it
    "openai": ("openai",),
    "litellm": ("litellm",),
    "langchain": ("langchain-openai", "langchain"),
    "llama-index": ("llama-index-core", "llama-index-llms-openai-like"),
    "instructor": ("instructor",),
    "pydantic-ai": ("pydantic-ai-slim[openai]",),
    "openai-agents": ("openai-agents",),
    "anthropic": ("anthropic",),
    "ollama": ("ollama",),
    "huggingface-hub": ("huggingface_hub", "pydantic"),
    "text-generation": ("text-generation",),
}
# Ollama's client sorts the keys of a tool. Then the embedded model calls get_price no more, but one of these two.
SORTED = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {argument: {"type": "string"} for argument in arguments},
                "required": arguments,
            },
        },
    }
    for name, description, arguments in (
        ("send_note", "Send a note to a person", ["name", "text"]),
        ("find_person", "Where a person is", ["name"]),
    )
]
BATCH_ENDS = ("completed", "failed", "expired", "cancelled")


def openai(url: str) -> Checks:
    """OpenAI's own client."""
    import openai as package

    client = package.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    calls, responses = _openai_calls(package, client), _openai_responses(client)
    return {**_openai_chat(client), **calls, **responses, "batch": lambda: _openai_batch(client)}


def _openai_chat(client: Any) -> Checks:  # noqa: ANN401 (the client's class)
    chat, to = client.chat.completions, {"model": MODEL, "temperature": 0}

    def stream() -> None:
        pieces = [
            chunk.choices[0].delta.content or "" for chunk in chat.create(messages=user(QUESTION), stream=True, **to)
        ]
        assert "".join(pieces)

    def two_turns() -> None:
        message = chat.create(messages=user(QUESTION), **to).choices[0].message
        again = chat.create(messages=[*user(QUESTION), message, *user(MORE)], **to)
        assert again.choices[0].message.content

    def structured() -> None:
        parsed = chat.parse(messages=user(FACTS), response_format=Record, max_tokens=200, **to)
        assert isinstance(parsed.choices[0].message.parsed, Record)

    return {
        "chat": lambda: some(chat.create(messages=user(QUESTION), **to).choices[0].message.content),
        "stream": stream,
        "two turns": two_turns,
        "structured output": structured,
        "embeddings": lambda: some(client.embeddings.create(model=MODEL, input=["a", "b"]).data[1].embedding),
    }


def _openai_calls(package: Any, client: Any) -> Checks:  # noqa: ANN401 (the client's module and class)
    from pydantic import BaseModel

    chat, to = client.chat.completions, {"model": MODEL, "temperature": 0}

    class GetPrice(BaseModel):
        item: str

    strict = {"tools": [package.pydantic_function_tool(GetPrice)], "tool_choice": "required"}

    def agent() -> None:
        call_and_answer(
            lambda messages: chat.create(messages=messages, tools=[tool()], **to).choices[0], lambda message: message
        )

    def streamed_call() -> None:
        name = arguments = ""
        for chunk in chat.create(messages=user(TASK), tools=[tool()], stream=True, **to):
            for call in chunk.choices[0].delta.tool_calls or ():
                name += call.function.name or ""
                arguments += call.function.arguments or ""
        assert (name, json.loads(arguments)) == ("get_price", {"item": "kite"})
        assert chunk.choices[0].finish_reason == "tool_calls"

    def required_call() -> None:
        for choice in ("required", {"type": "function", "function": {"name": "get_price"}}):
            made = chat.create(messages=user(QUESTION), tools=[tool()], tool_choice=choice, **to).choices[0].message
            assert isinstance(json.loads(made.tool_calls[0].function.arguments)["item"], str)

    def parsed_call() -> None:
        made = chat.parse(messages=user(TASK), parallel_tool_calls=False, **strict, **to)
        (call,) = made.choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, GetPrice)
        with chat.stream(messages=user(TASK), parallel_tool_calls=False, **strict, **to) as run:
            deltas = [event for event in run if event.type == "tool_calls.function.arguments.delta"]
            (streamed,) = run.get_final_completion().choices[0].message.tool_calls
        assert deltas[-1].arguments == streamed.function.arguments == call.function.arguments

    return {
        "tool call and answer": agent,
        "streamed call": streamed_call,
        "required call": required_call,
        "parsed call": parsed_call,
    }


def _openai_responses(client: Any) -> Checks:  # noqa: ANN401 (the client's class)
    responses, to = client.responses, {"model": MODEL, "temperature": 0}
    flat = {"type": "function", **PRICE}

    def stream() -> None:
        with responses.stream(input=QUESTION, **to) as run:
            text = "".join(event.delta for event in run if event.type == "response.output_text.delta")
            assert text and text == run.get_final_response().output_text

    def structured() -> None:
        assert isinstance(responses.parse(input=FACTS, text_format=Record, **to).output_parsed, Record)

    def agent() -> None:
        first = responses.create(input=TASK, tools=[flat], **to)
        (call,) = (item for item in first.output if item.type == "function_call")
        shop = Shop()
        result = {"type": "function_call_output", "call_id": call.call_id}
        result["output"] = shop.get_price(**json.loads(call.arguments))
        last = responses.create(input=[result], previous_response_id=first.id, tools=[flat], **to)
        shop.has_answered(last.output_text)

    return {
        "response": lambda: some(responses.create(input=QUESTION, **to).output_text),
        "streamed response": stream,
        "structured response": structured,
        "response: tool call and answer": agent,
    }


def _openai_batch(client: Any) -> None:  # noqa: ANN401 (the client's class)
    body = {"model": MODEL, "messages": user(QUESTION), "max_tokens": 20}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    while made.status not in BATCH_ENDS:
        time.sleep(0.05)
        made = client.batches.retrieve(made.id)
    answer = json.loads(client.files.content(made.output_file_id).text)
    assert answer["custom_id"] == "a" and answer["response"]["body"]["choices"][0]["message"]["content"]


def litellm(url: str) -> Checks:
    """LiteLLM with its provider for vLLM."""
    import litellm as package

    to: Any = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"}
    greedy: Any = {**to, "temperature": 0}

    def stream() -> None:
        parts = package.completion(messages=user(QUESTION), stream=True, **greedy)
        assert "".join(part.choices[0].delta.content or "" for part in parts)

    def two_turns() -> None:
        message = package.completion(messages=user(QUESTION), **greedy).choices[0].message
        for kept in (message, message.model_dump()):  # the object, and what programs store
            again = package.completion(messages=[*user(QUESTION), kept, *user(MORE)], **greedy)
            assert again.choices[0].message.content

    def structured() -> None:
        answer = package.completion(messages=user(FACTS), response_format=Record, max_tokens=200, **greedy)
        Record.model_validate_json(answer.choices[0].message.content)

    def embeddings() -> None:
        assert package.embedding(input=["a", "b"], **to).data[1]["embedding"]

    def agent() -> None:
        for keep in (lambda message: message, lambda message: message.model_dump()):
            call_and_answer(
                lambda messages: package.completion(messages=messages, tools=[tool()], **greedy).choices[0], keep
            )

    def streamed_call() -> None:
        parts = package.completion(messages=user(TASK), tools=[tool()], stream=True, **greedy)
        whole = package.stream_chunk_builder(list(parts)).choices[0]
        (call,) = whole.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_price", {"item": "kite"})
        assert whole.finish_reason == "tool_calls"

    def required_call() -> None:
        for choice in ("required", {"type": "function", "function": {"name": "get_price"}}):
            made = package.completion(messages=user(QUESTION), tools=[tool()], tool_choice=choice, **greedy)
            (call,) = made.choices[0].message.tool_calls
            assert isinstance(json.loads(call.function.arguments)["item"], str)

    def response() -> None:
        made = package.responses(input=QUESTION, **greedy)
        assert made.output[0].content[0].text

    return {
        "chat": lambda: some(package.completion(messages=user(QUESTION), **greedy).choices[0].message.content),
        "stream": stream,
        "two turns": two_turns,
        "structured output": structured,
        "embeddings": embeddings,
        "tool call and answer": agent,
        "streamed call": streamed_call,
        "required call": required_call,
        "response": response,
    }


def anthropic(url: str) -> Checks:
    """Anthropic's own client."""
    import anthropic as package

    client = package.Anthropic(base_url=url, api_key="none", max_retries=0)
    greedy: dict[str, Any] = {"model": MODEL, "max_tokens": 120, "extra_body": {"temperature": 0}}
    schema = PRICE["parameters"]
    tools: Any = [{"name": PRICE["name"], "description": PRICE["description"], "input_schema": schema}]

    def stream() -> None:
        with client.messages.stream(messages=user(QUESTION), **greedy) as run:
            assert "".join(run.text_stream) == run.get_final_message().content[0].text

    def two_turns() -> None:
        first = client.messages.create(messages=user(QUESTION), **greedy)
        history: Any = [*user(QUESTION), {"role": "assistant", "content": first.content}, *user(MORE)]
        assert client.messages.create(messages=history, **greedy).content

    def agent() -> None:
        task: Any = user(TASK)
        with client.messages.stream(messages=task, tools=tools, **greedy) as run:
            first = run.get_final_message()
        call = next(block for block in first.content if block.type == "tool_use")
        assert first.stop_reason == "tool_use"
        shop = Shop()
        result = {"type": "tool_result", "tool_use_id": call.id, "content": shop.get_price(**call.input)}
        history = [*task, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        last = client.messages.create(messages=history, tools=tools, **greedy)
        shop.has_answered(last.content[0].text)

    def required_call() -> None:
        for choice in ({"type": "any"}, {"type": "tool", "name": "get_price"}):
            made = client.messages.create(messages=user(QUESTION), tools=tools, tool_choice=choice, **greedy)
            assert isinstance(made.content[0].input["item"], str)

    def runner() -> None:
        shop = Shop()

        @package.beta_tool(name=PRICE["name"], description=PRICE["description"], input_schema=schema)
        def get_price(item: str) -> str:
            return shop.get_price(item)

        run = client.beta.messages.tool_runner(messages=user(TASK), tools=[get_price], **greedy)
        shop.has_answered(run.until_done().content[0].text)

    def thinking() -> None:
        budget: Any = {"type": "enabled", "budget_tokens": 1024}
        found = client.messages.create(messages=user(SUM), thinking=budget, **{**greedy, "max_tokens": 2000})
        assert [block.type for block in found.content] == ["thinking", "text"]

    def refused() -> None:
        try:
            client.messages.create(messages=user(QUESTION), **{**greedy, "model": "claude"})
        except package.NotFoundError as error:
            assert error.body["error"]["type"] == "not_found_error"
        else:
            raise AssertionError("a model that is not served is accepted")

    return {
        "chat": lambda: some(client.messages.create(messages=user(QUESTION), **greedy).content[0].text),
        "stream": stream,
        "two turns": two_turns,
        "count tokens": lambda: some(client.messages.count_tokens(model=MODEL, messages=user(QUESTION)).input_tokens),
        "tool call and answer": agent,
        "required call": required_call,
        "tool runner": runner,
        "thinking": thinking,
        "error": refused,
    }


def ollama(url: str) -> Checks:
    """Ollama's own client."""
    import ollama as package

    client, greedy = package.Client(host=url), {"temperature": 0, "num_predict": 120}
    to: dict[str, Any] = {"model": MODEL, "options": greedy}

    def stream() -> None:
        whole = client.chat(messages=user(QUESTION), **to)
        parts = list(client.chat(messages=user(QUESTION), stream=True, **to))
        assert "".join(part.message.content for part in parts) == whole.message.content
        assert parts[-1].done_reason == "stop"

    def two_turns() -> None:
        first = client.chat(messages=user(QUESTION), **to)
        assert client.chat(messages=[*user(QUESTION), first.message, *user(MORE)], **to).message.content

    def structured() -> None:
        found = client.chat(messages=user(FACTS), format=Record.model_json_schema(), **to)
        Record.model_validate_json(found.message.content)

    def agent() -> None:
        history, places = user("Find Theo."), {"Theo": "park"}
        first = client.chat(messages=history, tools=SORTED, **to)
        (call,) = first.message.tool_calls
        assert call.function.name == "find_person"
        result = json.dumps({"place": places[call.function.arguments["name"]]})
        history += [first.message, {"role": "tool", "tool_name": "find_person", "content": result}]
        last = client.chat(messages=history, tools=SORTED, **to)
        assert "park" in last.message.content and last.done_reason == "stop"

    def models() -> None:
        (listed,), (loaded,) = client.list().models, client.ps().models
        assert listed.model == loaded.model == f"{MODEL}:latest"
        assert "completion" in client.show(listed.model).capabilities
        assert client.pull(listed.model).status == "success"

    def refused() -> None:
        for wrong in (lambda: client.chat("llama3", user(QUESTION)), lambda: client.pull("llama3")):
            try:
                wrong()
            except package.ResponseError as error:
                assert error.status_code == 404
            else:
                raise AssertionError("a model that is not served is accepted")

    return {
        "chat": lambda: some(client.chat(messages=user(QUESTION), **to).message.content),
        "generate": lambda: some(client.generate(prompt=QUESTION, system="Be brief.", **to).response),
        "stream": stream,
        "two turns": two_turns,
        "structured output": structured,
        "embeddings": lambda: some(client.embed(model=MODEL, input=["a", "b"]).embeddings[1]),
        "tool call and answer": agent,
        "thinking": lambda: some(client.chat(messages=user(SUM), think=True, **to).message.thinking),
        "models": models,
        "error": refused,
    }


CLIENTS: Mapping[str, Callable[[str], Checks]] = {
    "openai": openai,
    "litellm": litellm,
    "langchain": langchain,
    "llama-index": llama_index,
    "instructor": instructor,
    "pydantic-ai": pydantic_ai,
    "openai-agents": openai_agents,
    "anthropic": anthropic,
    "ollama": ollama,
    "huggingface-hub": huggingface_hub,
    "text-generation": text_generation,
}


def versions(packages: tuple[str, ...]) -> str:
    """The version of the first package, and the other packages with theirs."""
    first, *others = (name.partition("[")[0] for name in packages)
    return ", ".join([version(first), *(f"{name} {version(name)}" for name in others)])


def main() -> None:
    """Run the checks of one client."""
    name, url = sys.argv[1:]
    output = sys.stdout
    with redirect_stdout(sys.stderr):  # some clients print
        print(versions(PACKAGES[name]), file=output, flush=True)
        for check, run in CLIENTS[name](url).items():
            try:
                run()
                message = None
            except Exception as error:  # whatever the client raises is the result
                message = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            print(json.dumps([check, message]), file=output, flush=True)


if __name__ == "__main__":
    main()
