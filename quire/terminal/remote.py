"""A model behind a server with OpenAI's chat API, as `quire chat --url` talks to it."""

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import httpx2

from quire.chat.parts import CallArguments, CallBegin, CallEnd, Content, Part, Reasoning
from quire.core.prompt_progress import PromptProgress
from quire.errors import QuireError, RequestError
from quire.params import LoRARequest, SamplingParams, StructuredOutputsParams

_CONNECT_SECONDS = 10.0
_EVENT = "data:"


class ServerFailed(QuireError):
    """The server cannot be reached, or did not answer as such a server does."""


class RemoteModel:
    """The model of a server, or one of several by its name. It has what `quire.terminal.chat` needs of an LLM.

    given: fields of each request, such as temperature; the server has the defaults of others.
    """

    def __init__(self, url: str, api_key: str | None, model: str | None, given: Mapping[str, float | None]) -> None:
        """Raises ServerFailed for a server that cannot be reached, or that does not have the model."""
        if api_key and not api_key.isascii():
            raise ServerFailed("an API key has only ASCII characters")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx2.Timeout(None, connect=_CONNECT_SECONDS)
        self._url = url.rstrip("/").removesuffix("/v1")
        try:
            self._client = httpx2.Client(base_url=self._url, headers=headers, timeout=timeout)
        except (httpx2.InvalidURL, ValueError) as error:
            raise ServerFailed(f"{url} is no URL of a server ({error}); write http://127.0.0.1:8000") from error
        self._given = {name: value for name, value in given.items() if value is not None}
        with ExitStack() as undo:
            undo.callback(self.close)
            self.model_name, self.max_model_len = self._find(model)
            undo.pop_all()

    def _find(self, model: str | None) -> tuple[str, int]:
        """The name of the model, and its context in tokens; 0 if the server does not say. Raises ServerFailed."""
        try:
            models = {str(one["id"]): one for one in self._get("/v1/models")["data"]}
        except (KeyError, TypeError) as error:
            raise ServerFailed(
                f"{self._url}/v1/models is no list of models; name a server with OpenAI's API"
            ) from error
        if not models or (model is not None and model not in models):
            has = f"it has {', '.join(models)}" if models else "it has none"
            raise ServerFailed(f"{self._url} does not serve {model or 'a model'}; {has}")
        name = model or next(iter(models))
        return name, int(models[name].get("max_model_len") or 0)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def stream_message(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        on_step: Callable[[PromptProgress], None],
        lora_request: LoRARequest | None = None,
    ) -> Generator[tuple[list[Part], int]]:
        """See LLM.stream_message. Of the sampling parameters only the constraint is sent; the server has the others."""
        del on_step, lora_request
        body: dict[str, Any] = {"model": self.model_name, "messages": list(messages), "stream": True, **self._given}
        if tools:
            body["tools"] = list(tools)
        if sampling_params is not None and sampling_params.structured_outputs is not None:
            body["response_format"] = _response_format(sampling_params.structured_outputs)
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        reader = _PartReader()
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as answer:
                if not answer.is_success:
                    raise RequestError(_message(answer.read()))
                for line in answer.iter_lines():
                    data = line.removeprefix(_EVENT).strip()
                    if line.startswith(_EVENT) and data != "[DONE]":
                        yield reader.read(json.loads(data))
        except httpx2.HTTPError as error:
            raise RequestError(f"the connection to {self._url} was lost: {error}") from error
        except ValueError as error:
            raise RequestError(f"{self._url} sent an event that is no JSON: {error}") from error

    def _get(self, path: str) -> Any:  # noqa: ANN401 (JSON)
        try:
            answer = self._client.get(path, timeout=_CONNECT_SECONDS)
            if not answer.is_success:
                raise ServerFailed(f"{self._url}{path}: {_message(answer.content)}")
            return answer.json()
        except httpx2.HTTPError as error:
            raise ServerFailed(f"{self._url} cannot be reached ({error}); is the server running?") from error
        except ValueError as error:
            raise ServerFailed(f"{self._url}{path} answers no JSON; name a server with OpenAI's API") from error


class _PartReader:
    """Reads the chunks of one message."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._open: int | None = None  # index of the call whose arguments come

    def read(self, chunk: Mapping[str, Any]) -> tuple[list[Part], int]:
        """The parts of a chunk, and the number of tokens since the last one. Raises RequestError for an error."""
        if "error" in chunk:
            error = chunk["error"]
            raise RequestError(str(error.get("message", error) if isinstance(error, Mapping) else error))
        usage = chunk.get("usage") or {}
        before, self._num_tokens = self._num_tokens, int(usage.get("completion_tokens") or self._num_tokens)
        parts = [part for choice in chunk.get("choices") or () for part in self._parts(choice)]
        return parts, max(0, self._num_tokens - before)

    def _parts(self, choice: Mapping[str, Any]) -> Iterator[Part]:
        delta = choice.get("delta") or {}
        if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
            yield Reasoning(str(reasoning))
        if content := delta.get("content"):
            yield Content(str(content))
        for call in delta.get("tool_calls") or ():
            index, function = int(call.get("index") or 0), call.get("function") or {}
            if index != self._open:
                yield from self._end_call()
                self._open = index
                yield CallBegin(index, str(function.get("name") or ""))
            if arguments := function.get("arguments"):
                yield CallArguments(index, str(arguments))
        if choice.get("finish_reason") in ("tool_calls", "stop"):
            yield from self._end_call()

    def _end_call(self) -> Iterator[Part]:
        if self._open is not None:
            yield CallEnd(self._open)
            self._open = None


def _response_format(constraint: StructuredOutputsParams) -> dict[str, object]:
    """The response_format of a constraint of /json."""
    if constraint.json is None:
        return {"type": "json_object"}
    schema = json.loads(constraint.json) if isinstance(constraint.json, str) else constraint.json
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _message(body: bytes) -> str:
    """The message of an error, or the start of a body that has none."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
