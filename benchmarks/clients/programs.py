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
MORE = "And the tent?"
RECORD = "Faye took 18 white ladders on Thursday.\nJSON keys: count, name"  # the embedded model knows this form
PACKAGES = {  # client -> what is installed for it
    **{"openai": "openai", "litellm": "litellm", "langchain": "langchain-openai", "instructor": "instructor"},
    "pydantic-ai": "pydantic-ai-slim[openai]",
}
TOOLS = "tool call"  # the check whose failure is expected until quire has tool calls

Checks = Mapping[str, Callable[[], object]]


def openai(url: str) -> Checks:
    """OpenAI's own client."""
    import openai as package
    from pydantic import BaseModel

    client = package.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    chat, ask = client.chat.completions, [{"role": "user", "content": QUESTION}]

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
        TOOLS: lambda: _some(chat.create(model=MODEL, messages=ask, tools=[_tool()]).choices[0].message.tool_calls),
    }


def litellm(url: str) -> Checks:
    """LiteLLM with its provider for vLLM."""
    import litellm as package
    from pydantic import BaseModel

    ask = [{"role": "user", "content": QUESTION}]
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
        TOOLS: lambda: _some(package.completion(messages=ask, tools=[_tool()], **to).choices[0].message.tool_calls),
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

    def get_price(thing: str) -> int:
        """Price of a thing."""
        return len(thing)

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
        TOOLS: lambda: _some(model.bind_tools([get_price]).invoke(QUESTION).tool_calls),
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


CLIENTS: Mapping[str, Callable[[str], Checks]] = {
    **{"openai": openai, "litellm": litellm, "langchain": langchain, "instructor": instructor},
    "pydantic-ai": pydantic_ai,
}


def _some(value: Any) -> None:  # noqa: ANN401 (of any client)
    assert value, f"the answer is empty: {value!r}"


def _tool() -> Any:  # noqa: ANN401 (each client has a type of its own)
    parameters = {"type": "object", "properties": {"thing": {"type": "string"}}, "required": ["thing"]}
    return {"type": "function", "function": {"name": "get_price", "parameters": parameters}}


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
