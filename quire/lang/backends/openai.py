"""Backend for endpoints with OpenAI's API, completions or chat."""

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from quire.core.scheduling_params import Program
from quire.errors import RequestError
from quire.lang.backends.backend import Backend, Piece, RoleTexts
from quire.lang.backends.http import Http, response_errors
from quire.lang.backends.roles import plain_texts
from quire.lang.params import GenParams
from quire.lang.select import ChoicesDecision, ChoicesSamplingMethod, TokenLogprob, common_prefix_len, decide
from quire.lang.state_text import Prompt

_DEFAULTS = GenParams()


def sampling_fields(params: GenParams, *, extensions: bool) -> dict[str, object]:
    """Sampling fields of a request body. Raises RequestError for a parameter that the endpoint does not support."""
    asked: dict[str, object] = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
    }
    for name in ("frequency_penalty", "presence_penalty", "n", "seed"):
        if getattr(params, name) != getattr(_DEFAULTS, name):
            asked[name] = getattr(params, name)
    if params.stop:
        asked["stop"] = list(params.stop)
    return {
        **asked,
        **_extension_fields(params, extensions=extensions),
        **_constraint_fields(params, extensions=extensions),
    }


def completion_logprobs(params: GenParams) -> dict[str, object]:
    """Logprob fields of a completions body."""
    return {"logprobs": params.top_logprobs_num or 0} if params.return_logprob else {}


def chat_logprobs(params: GenParams) -> dict[str, object]:
    """Logprob fields of a chat body."""
    if not params.return_logprob:
        return {}
    return {"logprobs": True, **({"top_logprobs": params.top_logprobs_num} if params.top_logprobs_num else {})}


def text_of(choice: Mapping[str, Any], part: str) -> str:
    """The text of a completions choice, or of a chat choice's `part` ("message" or "delta")."""
    if "text" in choice:
        return choice["text"] or ""
    return (choice.get(part) or {}).get("content") or ""


def meta_info(
    answer: Mapping[str, Any], choice: Mapping[str, Any], usage: Mapping[str, Any], prompt_length: int | None
) -> dict[str, Any]:
    """SGLang's meta_info of a choice. prompt_length: characters; None for an event of a stream."""
    reason = choice.get("finish_reason")
    why = {"type": reason} if reason else None
    if reason in ("error", "abort"):
        why = {"type": reason, "message": choice.get("stop_reason")}
    meta = {"id": answer.get("id"), "finish_reason": why, **usage}
    logprobs = choice.get("logprobs")
    if logprobs:
        meta["logprobs"] = logprobs
    if prompt_length is not None and logprobs and logprobs.get("text_offset"):
        meta["token_offsets"] = _relative(logprobs["text_offset"])
    return meta


def _relative(offsets: list[int]) -> list[int]:
    """Offsets from the begin of the output. Some endpoints count from the begin of the prompt."""
    return [offset - offsets[0] for offset in offsets]


def _extension_fields(params: GenParams, *, extensions: bool) -> dict[str, object]:
    names = ("top_k", "min_p", "stop_token_ids", "stop_regex", "ignore_eos", "min_tokens")
    set_names = [name for name in names if getattr(params, name) != getattr(_DEFAULTS, name)]
    if set_names and not extensions:
        raise RequestError(
            f"OpenAI's API has no {', '.join(set_names)}; leave it out, or use OpenAI(..., extensions=True) if the "
            "endpoint supports vLLM's fields",
            set_names[0],
        )
    values = {name: getattr(params, name) for name in set_names}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _constraint_fields(params: GenParams, *, extensions: bool) -> dict[str, object]:
    if params.constraint is None:
        return {}
    kind, text = params.constraint
    if kind == "json_schema":
        schema = {"name": "output", "schema": json.loads(text), "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    if not extensions:
        raise RequestError(
            f"OpenAI's API has no {kind}; use json_schema, or OpenAI(..., extensions=True) if the endpoint "
            "supports vLLM's structured_outputs",
            kind,
        )
    return {"structured_outputs": {"regex" if kind == "regex" else "grammar": text}}


class OpenAI(Backend):
    """Backend for an endpoint, such as https://host/v1.

    model_name: None means the first that the endpoint lists; an adapter takes its place. is_chat_model: use chat, which
    is the default, not completions. extensions: whether the endpoint supports vLLM's fields, as quire, vLLM and SGLang
    do: structured_outputs, top_k, min_p, stop_token_ids, ignore_eos, min_tokens, and continue_final_message, without
    which nothing may precede a gen in an assistant's turn. Raises RequestError, GenerationFailed.
    """

    def __init__(
        self,
        model_name: str | None = None,
        is_chat_model: bool | None = None,  # noqa: FBT001 (SGLang's signature)
        *,
        base_url: str = "https://api.openai.com/v1",
        api_key: str | None = None,
        extensions: bool = False,
    ) -> None:
        self._http = Http(base_url, api_key)
        super().__init__(hints=False)
        self.is_chat_model = True if is_chat_model is None else is_chat_model
        self._extensions = extensions
        try:
            self.model_name = model_name or self._first_model()
        except BaseException:
            self.close()
            raise

    @property
    def token_usage(self) -> Any:  # noqa: ANN401  (SGLang's name)
        """Tokens of all calls so far; has prompt_tokens and completion_tokens."""
        return self.stats

    async def generate(
        self, prompt: Prompt, params: GenParams, program: Program | None, *, stream: bool
    ) -> AsyncGenerator[Piece]:
        """See Backend. Raises RequestError, GenerationFailed."""
        path, body = self._request(prompt, params)
        self.stats.num_calls += 1
        if stream:
            async with aclosing(self._streamed(path, body)) as streamed:
                async for piece in streamed:
                    yield piece
            return
        answer = await self._http.post(path, body)
        with response_errors():
            usage = self._count(answer.get("usage"))
            pieces = [
                Piece(
                    text_of(choice, "message"),
                    meta_info(answer, choice, usage, len(prompt.text)),
                    int(choice.get("index", 0)),
                )
                for choice in answer["choices"]
            ]
        for piece in pieces:
            yield piece

    async def select(
        self,
        prompt: Prompt,
        choices: tuple[str, ...],
        method: ChoicesSamplingMethod,
        program: Program | None,
        *,
        adapter: str | None = None,
    ) -> ChoicesDecision:
        """The choice that the method ranks first. Needs an endpoint that echoes prompts with logprobs.

        Chat has no prompt logprobs: there, `method` is not used, and the model generates one of the choices under a
        constraint. Raises RequestError, GenerationFailed.
        """
        if self.is_chat_model:
            return await self._generate_choice(prompt, choices, adapter)
        model = adapter or self.model_name
        logprobs = await self._echo_logprobs(
            model, [prompt.text] if prompt.text else [], [prompt.text + choice for choice in choices]
        )
        before = [] if not prompt.text else logprobs.pop(0)
        (names,) = _token_texts([before])
        scores = [
            entries[common_prefix_len(names, own) :]
            for entries, own in zip(logprobs, _token_texts(logprobs), strict=True)
        ]
        alone = None
        if method.requires_unconditional_logprobs:
            alone = await self._echo_logprobs(model, [], list(choices))
            if _token_texts(scores) != _token_texts(alone):
                raise RequestError(
                    "this endpoint tokenizes a choice alone differently than after the prompt; use another method",
                    "choices_method",
                )
        return decide(choices, method, scores, alone)

    async def role_texts(self, roles: tuple[str, ...]) -> RoleTexts:
        """`plain_texts`. With chat, the endpoint applies the chat template."""
        return plain_texts(roles)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.close()

    def _request(self, prompt: Prompt, params: GenParams) -> tuple[str, dict[str, object]]:
        if params.tools:
            raise RequestError("gen(tools=...) needs a quire engine, or RuntimeEndpoint for a quire server", "tools")
        body = {"model": params.adapter or self.model_name, **sampling_fields(params, extensions=self._extensions)}
        if params.prediction is not None:
            if not (self.is_chat_model or self._extensions):
                raise RequestError(
                    "OpenAI's completions have no prediction; leave it out, or use chat, or OpenAI(..., "
                    "extensions=True) for quire's server",
                    "prediction",
                )
            body["prediction"] = {"type": "content", "content": params.prediction}
        if not self.is_chat_model:
            logprobs = completion_logprobs(params)
            return "/completions", {**body, "prompt": prompt.text, **logprobs}
        whole = {"separate_reasoning": False} if self._extensions else {}  # a state has all of the model's text
        return "/chat/completions", {**body, **whole, **self._conversation(prompt), **chat_logprobs(params)}

    def _conversation(self, prompt: Prompt) -> dict[str, object]:
        messages: list[Mapping[str, str]] = list(prompt.messages)
        if prompt.role != "assistant":
            raise RequestError("on a chat endpoint, gen must be in an assistant turn; put it in assistant(...)")
        if not prompt.turn:
            return {"messages": messages}
        if not self._extensions:
            raise RequestError(
                "on a chat endpoint, gen must begin the assistant's turn: append nothing before it in that turn, or "
                "use @function(num_api_spec_tokens=...), or OpenAI(..., extensions=True) if the endpoint supports "
                "continue_final_message"
            )
        messages.append({"role": "assistant", "content": prompt.turn})
        return {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}

    async def _streamed(self, path: str, body: dict[str, object]) -> AsyncGenerator[Piece]:
        meta: dict[str, Any] = {}
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with aclosing(self._http.events(path, asked)) as events:
            async for event in events:
                with response_errors():
                    usage = self._count(event.get("usage"))
                    choices = event.get("choices") or ()
                    pieces = [(text_of(one, "delta"), meta_info(event, one, {}, None)) for one in choices]
                for text, one in pieces:
                    meta = {**one, "finish_reason": one["finish_reason"] or meta.get("finish_reason")}
                    yield Piece(text, meta)
                if usage and not pieces:
                    yield Piece("", {**meta, **usage})

    async def _generate_choice(self, prompt: Prompt, choices: Sequence[str], adapter: str | None) -> ChoicesDecision:
        if not self._extensions:
            raise RequestError(
                "select needs logprobs of prompts, which chat endpoints do not return, or OpenAI(..., extensions=True) "
                "if the endpoint supports structured_outputs"
            )
        path, body = self._request(prompt, GenParams(temperature=0.0, max_tokens=256, adapter=adapter))
        self.stats.num_calls += 1
        answer = await self._http.post(path, {**body, "structured_outputs": {"choice": list(choices)}})
        with response_errors():
            self._count(answer.get("usage"))
            written = text_of(answer["choices"][0], "message")
        if written not in choices:
            raise RequestError(f"this endpoint ignores structured_outputs: it returned {written!r:.100}")
        return ChoicesDecision(written)

    async def _echo_logprobs(self, model: str, before: list[str], texts: list[str]) -> list[list[TokenLogprob]]:
        """Entries of each text's tokens, from one completions call with echo. The token ids are -1."""
        asked = {"prompt": [*before, *texts], "echo": True, "logprobs": 0, "max_tokens": 0, "temperature": 0.0}
        self.stats.num_calls += 1
        try:
            answer = await self._http.post("/completions", {"model": model, **asked})
        except RequestError as error:
            raise RequestError(
                f"select needs an endpoint that echoes prompts with logprobs, and this one failed: {error}", "choices"
            ) from error
        with response_errors():
            self._count(answer.get("usage"))
            choices = sorted(answer["choices"], key=lambda one: int(one.get("index", 0)))
            logprobs = [choice["logprobs"] for choice in choices]
            return [
                [(logprob, -1, text) for logprob, text in zip(one["token_logprobs"], one["tokens"], strict=True)]
                for one in logprobs
            ]

    def _first_model(self) -> str:
        models = self.loop.run(self._http.get("/models"))
        with response_errors():
            return str(models["data"][0]["id"])

    def _count(self, usage: Mapping[str, Any] | None) -> dict[str, Any]:
        """Token counts for the meta info. Adds them to the stats."""
        if not usage:
            return {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        prompt, completion = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
        self.stats.count(prompt, completion, cached)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "cached_tokens": cached}


def _token_texts(logprobs: Sequence[Sequence[TokenLogprob]]) -> list[list[str | None]]:
    """The texts of tokens, which identify them, as this API has no ids."""
    return [[text for _, _, text in entries] for entries in logprobs]
