"""Checks with the clients of Text Generation Inference: huggingface_hub, text-generation."""

# ruff: noqa: PLC0415 (an environment may lack the other clients)

from typing import Any

from benchmarks.clients.questions import FACTS, MORE, QUESTION, Checks, Record, call_and_answer, some, tool, user

STORY = "One Tuesday Mira went to the"


def huggingface_hub(url: str) -> Checks:
    """InferenceClient, for chat at /v1 and for text at /. It sends names of its own where no model is named."""
    from huggingface_hub import InferenceClient

    chat, text = InferenceClient(base_url=f"{url}/v1"), InferenceClient(model=url)

    def choice(messages: Any, **fields: Any) -> Any:  # noqa: ANN401 (of the client)
        return chat.chat_completion(messages, max_tokens=120, temperature=0, **fields).choices[0]

    def ask(messages: Any, **fields: Any) -> Any:  # noqa: ANN401 (of the client)
        return choice(messages, **fields).message

    def stream() -> None:
        chunks = chat.chat_completion(user(QUESTION), max_tokens=120, temperature=0, stream=True)
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(pieces) == ask(user(QUESTION)).content
        assert len(pieces) > 3

    def two_turns() -> None:
        first = {"role": "assistant", "content": ask(user(QUESTION)).content}
        some(ask([*user(QUESTION), first, *user(MORE)]).content)

    def structured() -> None:
        format = {"type": "json_schema", "json_schema": {"name": "record", "schema": Record.model_json_schema()}}
        Record.model_validate_json(ask(user(FACTS), response_format=format).content)

    def generated() -> None:
        whole = text.text_generation(STORY, max_new_tokens=12)
        parts = list(text.text_generation(STORY, max_new_tokens=12, stream=True, details=True))
        assert "".join(part.token.text for part in parts) == whole
        assert parts[-1].generated_text == whole
        details = text.text_generation(STORY, max_new_tokens=12, details=True).details
        assert details.generated_tokens == len(details.tokens) == 12

    return {
        "chat": lambda: some(ask(user(QUESTION)).content),
        "stream": stream,
        "two turns": two_turns,
        "structured output": structured,
        "text generation": generated,
        "tool call and answer": lambda: call_and_answer(lambda messages: choice(messages, tools=[tool()]), dict),
    }


def text_generation(url: str) -> Checks:
    """The archived client of TGI."""
    from text_generation import Client

    client = Client(url)

    def stream() -> None:
        pieces = [part.token.text for part in client.generate_stream(STORY, max_new_tokens=12)]
        assert "".join(pieces) == client.generate(STORY, max_new_tokens=12).generated_text

    return {
        "generate": lambda: some(client.generate(STORY, max_new_tokens=12).generated_text),
        "stream": stream,
    }
