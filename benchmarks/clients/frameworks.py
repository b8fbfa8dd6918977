"""Programs of frameworks that use OpenAI's client: agents with tools, and structured output.

Each is a function from the server's URL to checks, as in `programs`.
"""

# ruff: noqa: PLC0415 (an environment may lack the other clients)

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.clients.questions import (
    FACTS,
    MODEL,
    MORE,
    PRICE,
    QUESTION,
    TASK,
    Checks,
    Price,
    Record,
    Shop,
    some,
)


def langchain(url: str) -> Checks:
    """LangChain's classes for OpenAI, and its agent."""
    from langchain.agents import create_agent
    from langchain.agents.structured_output import ProviderStrategy
    from langchain_core.tools import StructuredTool
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    to: dict[str, Any] = {"model": MODEL, "base_url": f"{url}/v1", "api_key": "none"}
    model = ChatOpenAI(**to, max_retries=0, max_tokens=200, temperature=0)
    responses = ChatOpenAI(**to, max_retries=0, max_tokens=200, temperature=0, use_responses_api=True)
    asked: Any = {"messages": [("user", TASK)]}

    def two_turns() -> None:
        assert model.invoke([("user", QUESTION), model.invoke(QUESTION), ("user", MORE)]).content

    def structured(method: str) -> None:
        assert isinstance(model.with_structured_output(Record, method=method).invoke(FACTS), Record)

    def bound() -> None:
        (call,) = model.bind_tools([Shop().get_price]).invoke(TASK).tool_calls
        assert (call["name"], call["args"]) == ("get_price", {"item": "kite"})

    def required_call() -> None:
        for choice in ("required", "get_price"):
            (call,) = model.bind_tools([Shop().get_price], tool_choice=choice).invoke(QUESTION).tool_calls
            assert isinstance(call["args"]["item"], str)

    def agent(of: Any) -> None:  # noqa: ANN401 (a chat model)
        shop = Shop()
        made = create_agent(of, [StructuredTool.from_function(shop.get_price)])
        shop.has_answered(made.invoke(asked)["messages"][-1].text)

    def structured_agent() -> (
        None
    ):  # with chat the client makes the tool strict, which the embedded model does not know
        shop = Shop()
        made = create_agent(
            responses, [StructuredTool.from_function(shop.get_price)], response_format=ProviderStrategy(Price)
        )
        shop.has_answered(made.invoke(asked)["structured_response"])

    def streamed_agent(of: Any) -> None:  # noqa: ANN401 (a chat model)
        shop = Shop()
        made = create_agent(of, [StructuredTool.from_function(shop.get_price)])
        pieces = [part.text for part, _ in made.stream(asked, stream_mode="messages") if part.type == "AIMessageChunk"]
        shop.has_answered("".join(pieces))

    return {
        "chat": lambda: some(model.invoke(QUESTION).content),
        "stream": lambda: some("".join(str(part.content) for part in model.stream(QUESTION))),
        "two turns": two_turns,
        "structured output": partial(structured, "json_schema"),
        "structured output by a call": partial(structured, "function_calling"),
        "embeddings": lambda: some(OpenAIEmbeddings(**to, check_embedding_ctx_length=False).embed_documents(["a"])[0]),
        "tool call": bound,
        "required call": required_call,
        "agent": partial(agent, model),
        "streamed agent": partial(streamed_agent, model),
        "response": lambda: some(responses.invoke(QUESTION).text),
        "response: agent": partial(agent, responses),
        "response: streamed agent": partial(streamed_agent, responses),
        "response: structured agent": structured_agent,
    }


def llama_index(url: str) -> Checks:
    """LlamaIndex with its class for servers of OpenAI's API, and its agent."""
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    kind = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 2048}
    to: dict[str, Any] = {"api_base": f"{url}/v1", "api_key": "none", "max_retries": 0}
    model = OpenAILike(model=MODEL, max_tokens=200, temperature=0, **kind, **to)
    loop = asyncio.Runner()  # one for all checks, because the client's connections belong to a loop
    ask, facts = [ChatMessage(role="user", content=QUESTION)], [ChatMessage(role="user", content=FACTS)]

    def tool(shop: Shop) -> Any:  # noqa: ANN401 (the client's class)
        return FunctionTool.from_defaults(shop.get_price, name=PRICE["name"], description=PRICE["description"])

    def two_turns() -> None:
        again = [*ask, model.chat(ask).message, ChatMessage(role="user", content=MORE)]
        assert model.chat(again).message.content

    # the client's schemas have their own order, in which the embedded model makes calls only if it has to
    def call() -> None:
        made = model.chat_with_tools([tool(Shop())], user_msg=TASK, tool_required=True)
        (found,) = model.get_tool_calls_from_response(made)
        assert (found.tool_name, found.tool_kwargs) == ("get_price", {"item": "kite"})

    def streamed_call() -> None:
        parts = model.stream_chat_with_tools([tool(Shop())], user_msg=TASK, tool_required=True)
        (found,) = model.get_tool_calls_from_response(list(parts)[-1])
        assert (found.tool_name, found.tool_kwargs) == ("get_price", {"item": "kite"})

    async def agent(*, streaming: bool) -> None:
        shop = Shop()
        made = FunctionAgent(tools=[tool(shop)], llm=model, streaming=streaming, initial_tool_choice=PRICE["name"])
        shop.has_answered(await made.run(TASK))

    return {
        "chat": lambda: some(model.chat(ask).message.content),
        "stream": lambda: some("".join(part.delta or "" for part in model.stream_chat(ask))),
        "two turns": two_turns,
        "complete": lambda: some(model.complete(QUESTION).text),
        "structured output": lambda: some(isinstance(model.as_structured_llm(Record).chat(facts).raw, Record)),
        "required call": call,
        "streamed call": streamed_call,
        "agent": lambda: loop.run(agent(streaming=False)),
        "streamed agent": lambda: loop.run(agent(streaming=True)),
    }


def instructor(url: str) -> Checks:
    """Instructor around OpenAI's client."""
    import instructor as package
    import openai as wrapped

    client = wrapped.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": FACTS}], "response_model": Record}
    limits: Any = {"max_tokens": 200, "temperature": 0, "max_retries": 0}

    def create(**mode: Any) -> None:  # noqa: ANN401 (the client's enum)
        made = package.from_openai(client, **mode).chat.completions.create(**asked, **limits)
        assert isinstance(made, Record)

    def partial_objects() -> None:
        parts = list(package.from_openai(client).chat.completions.create_partial(**asked, **limits))
        Record.model_validate(parts[-1].model_dump())

    def response() -> None:
        wrapper = package.from_openai(client, mode=package.Mode.RESPONSES_TOOLS)
        made = wrapper.responses.create(
            input=FACTS, model=MODEL, response_model=Record, temperature=0, max_retries=0, max_output_tokens=200
        )
        assert isinstance(made, Record)

    return {
        "default mode (a call)": create,
        "strict call": lambda: create(mode=package.Mode.TOOLS_STRICT),
        "structured output": lambda: create(mode=package.Mode.JSON_SCHEMA),
        "streamed call": partial_objects,
        "response": response,
    }


def pydantic_ai(url: str) -> Checks:
    """pydantic-ai's agents."""
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    settings: Any = {"max_tokens": 200, "temperature": 0}
    chat, responses = (
        kind(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
        for kind in (OpenAIChatModel, OpenAIResponsesModel)
    )

    def asked(model: Any, **options: Any) -> Any:  # noqa: ANN401 (the client's classes)
        return Agent(model, model_settings=settings, retries=0, **options)

    async def stream(model: Any) -> None:  # noqa: ANN401 (the client's class)
        async with asked(model).run_stream(QUESTION) as run:
            assert "".join([part async for part in run.stream_text(delta=True)])

    def two_turns() -> None:
        history = asked(chat).run_sync(QUESTION).all_messages()
        assert asked(chat).run_sync(MORE, message_history=history).output

    def structured(model: Any, output: Any) -> None:  # noqa: ANN401 (a type, or a marker of the client)
        assert isinstance(asked(model, output_type=output).run_sync(FACTS).output, Record)

    def agent(model: Any) -> None:  # noqa: ANN401 (the client's class)
        shop = Shop()
        shop.has_answered(asked(model, tools=[shop.get_price]).run_sync(TASK).output)

    def structured_agent(model: Any) -> None:  # noqa: ANN401 (the client's class)
        shop = Shop()
        made = asked(model, tools=[shop.get_price], output_type=NativeOutput(Price))
        shop.has_answered(made.run_sync(TASK).output)

    async def streamed_agent(model: Any) -> None:  # noqa: ANN401 (the client's class)
        shop = Shop()
        async with asked(model, tools=[shop.get_price]).run_stream(TASK) as run:
            shop.has_answered(await run.get_output())

    def checks(model: Any) -> dict[str, Callable[[], object]]:  # noqa: ANN401 (the client's class)
        return {
            "chat": lambda: some(asked(model).run_sync(QUESTION).output),
            "stream": lambda: asyncio.run(stream(model)),
            "default output (a call)": lambda: structured(model, Record),
            "native output": lambda: structured(model, NativeOutput(Record)),
            "agent": lambda: agent(model),
            "structured agent": lambda: structured_agent(model),
            "streamed agent": lambda: asyncio.run(streamed_agent(model)),
        }

    of_responses = {f"response: {name}": check for name, check in checks(responses).items()}
    return {**checks(chat), "two turns": two_turns, **of_responses}


def openai_agents(url: str) -> Checks:
    """OpenAI's agents, by default with its responses."""
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        Runner,
        function_tool,
        set_default_openai_client,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    set_default_openai_client(client)
    set_tracing_disabled(disabled=True)
    loop = asyncio.Runner()  # one for all checks, because the client's connections belong to a loop
    greedy: Any = {"temperature": 0, "max_tokens": 200}

    def agent(model: Any, tool_choice: str | None = None, **options: Any) -> Any:  # noqa: ANN401 (of the client)
        return Agent(
            name="Pip", model=model, model_settings=ModelSettings(tool_choice=tool_choice, **greedy), **options
        )

    async def chat(model: Any) -> None:  # noqa: ANN401 (of the client)
        first = await Runner.run(agent(model), QUESTION)
        assert first.final_output
        again = await Runner.run(agent(model), [*first.to_input_list(), {"role": "user", "content": MORE}])
        assert again.final_output

    async def structured(model: Any) -> None:  # noqa: ANN401 (of the client)
        assert isinstance((await Runner.run(agent(model, output_type=Record), FACTS)).final_output, Record)

    async def with_tool(model: Any, **options: Any) -> None:  # noqa: ANN401 (of the client)
        shop = Shop()
        shop.has_answered((await Runner.run(agent(model, tools=[_agents_tool(shop)]), TASK, **options)).final_output)

    async def structured_agent(model: Any) -> None:  # noqa: ANN401 (of the client)
        shop = Shop()
        made = agent(model, tools=[_agents_tool(shop)], output_type=Price)
        shop.has_answered((await Runner.run(made, TASK)).final_output)

    async def streamed(model: Any) -> None:  # noqa: ANN401 (of the client)
        shop = Shop()
        run = Runner.run_streamed(agent(model, tools=[_agents_tool(shop)]), TASK)
        async for _event in run.stream_events():
            pass
        shop.has_answered(run.final_output)

    async def required_call(model: Any) -> None:  # noqa: ANN401 (of the client)
        shop = Shop()
        strict = function_tool(shop.get_price)
        await Runner.run(agent(model, "required", tools=[strict], tool_use_behavior="stop_on_first_tool"), QUESTION)
        assert len(shop.asked) == 1

    async def handoff(model: Any) -> None:  # noqa: ANN401 (of the client)
        expert = agent(model)
        run = await Runner.run(agent(model, "required", handoffs=[expert]), QUESTION)
        assert run.last_agent is expert and run.final_output

    def checks(model: Any) -> dict[str, Callable[[], object]]:  # noqa: ANN401 (of the client)
        each = {"two turns": chat, "structured output": structured, "agent": with_tool, "streamed agent": streamed}
        each |= {"structured agent": structured_agent, "required call": required_call, "handoff": handoff}
        return {name: lambda check=check: loop.run(check(model)) for name, check in each.items()}

    of_chat = checks(OpenAIChatCompletionsModel(MODEL, client))
    return {
        **checks(MODEL),
        "previous response": lambda: loop.run(with_tool(MODEL, auto_previous_response_id=True)),
        **{f"chat: {name}": check for name, check in of_chat.items()},
    }


def _agents_tool(shop: Shop) -> Any:  # noqa: ANN401 (the client's class)
    from agents import FunctionTool

    async def invoke(_context: object, arguments: str) -> str:
        return shop.get_price(**json.loads(arguments))

    return FunctionTool(PRICE["name"], PRICE["description"], PRICE["parameters"], invoke, strict_json_schema=False)
