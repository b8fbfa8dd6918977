"""One small program per client, run by the interpreter of an environment that has the client.

    python programs.py CLIENT URL

Prints the client's version, then one line of JSON per check: its name and null, or the error's message.
"""

# ruff: noqa: PLC0415 (an environment may lack the other clients)

import asyncio
import json
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

MODEL = "quire-demo"
QUESTION = "How much is the lamp?"
TASK = "Look up the price of the kite."  # the embedded model calls get_price, as it was trained to
SUM = "Sum: 13 25 31"  # it reasons about this form if asked to
MORE = "And the tent?"
RECORD = "Faye took 18 white ladders on Thursday.\nJSON keys: count, name"  # the embedded model knows this form
PACKAGES = {  # client -> what is installed for it
    **{"openai": "openai", "litellm": "litellm", "langchain": "langchain-openai", "instructor": "instructor"},
    **{"pydantic-ai": "pydantic-ai-slim[openai]", "anthropic": "anthropic", "ollama": "ollama"},
}
TOOLS = "tool call"

Checks = Mapping[str, Callable[[], object]]


def openai(url: str) -> Checks:
    """OpenAI's own client."""
    import openai as package
    from pydantic import BaseModel

    client = package.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    chat, ask, task = client.chat.completions, _user(QUESTION), _user(TASK)

    class Record(BaseModel):
        count: int
        name: str

    def stream() -> None:
        pieces = [chunk.choices[0].delta.content or "" for chunk in chat.create(model=MODEL, messages=ask, stream=True)]
        assert "".join(pieces)

    def two_turns() -> None:
        message = chat.create(model=MODEL, messages=ask).choices[0].message
        again = chat.create(model=MODEL, messages=[*ask, message, {"role": "user", "content": MORE}])
        assert again.choices[0].message.content

    def structured() -> None:
        asked = [{"role": "user", "content": RECORD}]
        parsed = chat.parse(model=MODEL, messages=asked, response_format=Record, max_tokens=200, temperature=0)
        assert isinstance(parsed.choices[0].message.parsed, Record)

    return {
        "chat": lambda: _some(chat.create(model=MODEL, messages=ask).choices[0].message.content),
        "stream": stream,
        "two turns": two_turns,
        "structured output": structured,
        "embeddings": lambda: _some(client.embeddings.create(model=MODEL, input=["a", "b"]).data[1].embedding),
        TOOLS: lambda: _some(chat.create(model=MODEL, messages=task, tools=[_tool()]).choices[0].message.tool_calls),
    }


def litellm(url: str) -> Checks:
    """LiteLLM with its provider for vLLM."""
    import litellm as package
    from pydantic import BaseModel

    ask, task = _user(QUESTION), _user(TASK)
    to = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"}

    class Record(BaseModel):
        count: int
        name: str

    def stream() -> None:
        parts = package.completion(messages=ask, stream=True, **to)
        assert "".join(part.choices[0].delta.content or "" for part in parts)

    def two_turns() -> None:
        message = package.completion(messages=ask, **to).choices[0].message
        for kept in (message, message.model_dump()):  # the object, and what programs store
            again = package.completion(messages=[*ask, kept, {"role": "user", "content": MORE}], **to)
            assert again.choices[0].message.content

    def structured() -> None:
        asked = [{"role": "user", "content": RECORD}]
        answer = package.completion(messages=asked, response_format=Record, max_tokens=200, temperature=0, **to)
        Record.model_validate_json(answer.choices[0].message.content)

    def embeddings() -> None:
        assert package.embedding(input=["a", "b"], **to).data[1]["embedding"]

    return {
        "chat": lambda: _some(package.completion(messages=ask, **to).choices[0].message.content),
        "stream": stream,
        "two turns": two_turns,
        "structured output": structured,
        "embeddings": embeddings,
        TOOLS: lambda: _some(package.completion(messages=task, tools=[_tool()], **to).choices[0].message.tool_calls),
    }


def langchain(url: str) -> Checks:
    """LangChain's classes for OpenAI."""
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings
    from pydantic import BaseModel

    to: dict[str, Any] = {"model": MODEL, "base_url": f"{url}/v1", "api_key": "none"}
    model = ChatOpenAI(**to, max_retries=0, max_tokens=200, temperature=0)

    class Record(BaseModel):
        count: int
        name: str

    def get_price(item: str) -> int:
        """Price of an item"""
        return len(item)

    def two_turns() -> None:
        assert model.invoke([("user", QUESTION), model.invoke(QUESTION), ("user", MORE)]).content

    def structured() -> None:
        assert isinstance(model.with_structured_output(Record).invoke(RECORD), Record)

    return {
        "chat": lambda: _some(model.invoke(QUESTION).content),
        "stream": lambda: _some("".join(str(part.content) for part in model.stream(QUESTION))),
        "two turns": two_turns,
        "structured output": structured,
        "embeddings": lambda: _some(OpenAIEmbeddings(**to, check_embedding_ctx_length=False).embed_documents(["a"])[0]),
        TOOLS: lambda: _some(model.bind_tools([get_price]).invoke(TASK).tool_calls),
    }


def instructor(url: str) -> Checks:
    """Instructor around OpenAI's client."""
    import instructor as package
    import openai as wrapped
    from pydantic import BaseModel

    client = wrapped.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    class Record(BaseModel):
        count: int
        name: str

    def create(mode: Any) -> Callable[[], None]:  # noqa: ANN401 (the client's enum)
        def run() -> None:
            made = package.from_openai(client, mode=mode).chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": RECORD}],
                response_model=Record,
                max_tokens=200,
                max_retries=0,
                temperature=0,
            )
            assert isinstance(made, Record)

        return run

    return {"structured output": create(package.Mode.JSON_SCHEMA), TOOLS: create(package.Mode.TOOLS)}


def pydantic_ai(url: str) -> Checks:
    """pydantic-ai's agents."""
    from pydantic import BaseModel
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    settings: Any = {"max_tokens": 200, "temperature": 0}
    agent = Agent(model, model_settings=settings)

    class Record(BaseModel):
        count: int
        name: str

    async def stream() -> None:
        async with agent.run_stream(QUESTION) as run:
            assert "".join([part async for part in run.stream_text(delta=True)])

    def two_turns() -> None:
        assert agent.run_sync(MORE, message_history=agent.run_sync(QUESTION).all_messages()).output

    def structured(output: Any) -> None:  # noqa: ANN401 (a type, or a marker of the client)
        assert isinstance(Agent(model, output_type=output, model_settings=settings).run_sync(RECORD).output, Record)

    return {
        "chat": lambda: _some(agent.run_sync(QUESTION).output),
        "stream": lambda: asyncio.run(stream()),
        "two turns": two_turns,
        "structured output": lambda: structured(NativeOutput(Record)),
        TOOLS: lambda: structured(Record),
    }


def anthropic(url: str) -> Checks:
    """Anthropic's own client."""
    import anthropic as package

    client = package.Anthropic(base_url=url, api_key="none", max_retries=0)
    greedy: dict[str, Any] = {"model": MODEL, "max_tokens": 120, "extra_body": {"temperature": 0}}
    tool = _tool()["function"]
    tools: Any = [{"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}]

    def stream() -> None:
        with client.messages.stream(messages=_user(QUESTION), **greedy) as run:
            assert "".join(run.text_stream) == run.get_final_message().content[0].text

    def two_turns() -> None:
        first = client.messages.create(messages=_user(QUESTION), **greedy)
        history: Any = [*_user(QUESTION), {"role": "assistant", "content": first.content}, *_user(MORE)]
        assert client.messages.create(messages=history, **greedy).content

    def agent() -> None:
        task: Any = _user(TASK)
        with client.messages.stream(messages=task, tools=tools, **greedy) as run:
            first = run.get_final_message()
        call = next(block for block in first.content if block.type == "tool_use")
        assert (first.stop_reason, call.input) == ("tool_use", {"item": "kite"})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"price": 73}'}
        history = [*task, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        last = client.messages.create(messages=history, tools=tools, **greedy)
        assert "73" in last.content[0].text

    def runner() -> None:
        @package.beta_tool(name="get_price", description="Price of an item", input_schema=tool["parameters"])
        def get_price(item: str) -> str:
            return f'{{"price": {len(item)}}}'

        run = client.beta.messages.tool_runner(messages=_user(TASK), tools=[get_price], **greedy)
        assert "costs" in run.until_done().content[0].text

    def thinking() -> None:
        budget: Any = {"type": "enabled", "budget_tokens": 1024}
        found = client.messages.create(messages=_user(SUM), thinking=budget, **{**greedy, "max_tokens": 2000})
        assert [block.type for block in found.content] == ["thinking", "text"]

    def refused() -> None:
        try:
            client.messages.create(messages=_user(QUESTION), **{**greedy, "model": "claude"})
        except package.NotFoundError as error:
            assert error.body["error"]["type"] == "not_found_error"
        else:
            raise AssertionError("a model that is not served is accepted")

    return {
        "chat": lambda: _some(client.messages.create(messages=_user(QUESTION), **greedy).content[0].text),
        "stream": stream,
        "two turns": two_turns,
        "count tokens": lambda: _some(client.messages.count_tokens(model=MODEL, messages=_user(QUESTION)).input_tokens),
        TOOLS: agent,
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
        whole = client.chat(messages=_user(QUESTION), **to)
        parts = list(client.chat(messages=_user(QUESTION), stream=True, **to))
        assert "".join(part.message.content for part in parts) == whole.message.content
        assert parts[-1].done_reason == "stop"

    def two_turns() -> None:
        first = client.chat(messages=_user(QUESTION), **to)
        assert client.chat(messages=[*_user(QUESTION), first.message, *_user(MORE)], **to).message.content

    def structured() -> None:
        schema = {"type": "object", "properties": {"count": {"type": "integer"}, "name": {"type": "string"}}}
        found = client.chat(messages=_user(RECORD), format={**schema, "required": ["count", "name"]}, **to)
        assert json.loads(found.message.content)["count"] == 18

    def agent() -> None:
        # the client sorts the keys of a tool, which the embedded model then does not know any more
        asked = {"messages": _user(TASK), "tools": [_tool()], "stream": False, **to}
        first = client._request(package.ChatResponse, "POST", "/api/chat", json=asked)
        (call,) = first.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("get_price", {"item": "kite"})
        result = {"role": "tool", "tool_name": "get_price", "content": '{"price": 73}'}
        last = client.chat(messages=[*_user(TASK), first.message, result], tools=[_tool()], **to)
        assert "73" in last.message.content

    def models() -> None:
        (listed,), (loaded,) = client.list().models, client.ps().models
        assert listed.model == loaded.model == f"{MODEL}:latest"
        assert "completion" in client.show(listed.model).capabilities

    def refused() -> None:
        for wrong in (lambda: client.chat("llama3", _user(QUESTION)), lambda: client.pull("llama3")):
            try:
                wrong()
            except package.ResponseError as error:
                assert error.status_code == 404
            else:
                raise AssertionError("a model that is not served is accepted")

    return {
        "chat": lambda: _some(client.chat(messages=_user(QUESTION), **to).message.content),
        "generate": lambda: _some(client.generate(prompt=QUESTION, system="Be brief.", **to).response),
        "stream": stream,
        "two turns": two_turns,
        "structured output": structured,
        "embeddings": lambda: _some(client.embed(model=MODEL, input=["a", "b"]).embeddings[1]),
        TOOLS: agent,
        "thinking": lambda: _some(client.chat(messages=_user(SUM), think=True, **to).message.thinking),
        "models": models,
        "error": refused,
    }


CLIENTS: Mapping[str, Callable[[str], Checks]] = {
    **{"openai": openai, "litellm": litellm, "langchain": langchain, "instructor": instructor},
    **{"pydantic-ai": pydantic_ai, "anthropic": anthropic, "ollama": ollama},
}


def _user(text: str) -> Any:  # noqa: ANN401 (each client has a type of its own)
    return [{"role": "user", "content": text}]


def _some(value: Any) -> None:  # noqa: ANN401 (of any client)
    assert value, f"the answer is empty: {value!r}"


def _tool() -> Any:  # noqa: ANN401 (each client has a type of its own)
    parameters = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
    function = {"name": "get_price", "description": "Price of an item", "parameters": parameters}
    return {"type": "function", "function": function}


def main() -> None:
    """Run the checks of one client."""
    name, url = sys.argv[1:]
    print(version(PACKAGES[name].partition("[")[0]), flush=True)
    for check, run in CLIENTS[name](url).items():
        try:
            run()
            message = None
        except Exception as error:  # whatever the client raises is the result
            message = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(json.dumps([check, message]), flush=True)


if __name__ == "__main__":
    main()
