"""/tokenize and /detokenize, with vLLM's bodies."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fastapi import APIRouter, Request, Response
from msgspec.json import encode
from pydantic import Field

from quire.errors import RequestError, out_of_vocabulary
from quire.server.api.openai.chat import num_unknown_fields, rendering_of, template_messages
from quire.server.api.openai.schema import Messages, TemplateBody
from quire.server.held_answer import hold
from quire.server.middleware.auth import caller_of
from quire.server.request_params import RequestBody, TokenIds, optional_field, unsupported_field
from quire.server.service import CHARACTERS_PER_TOKEN, Service
from quire.tenant_memory import LARGE

# the field that has what is tokenized -> the fields that apply to it
_FORMS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "prompt": ("add_special_tokens", "return_token_strs", "tool_choice"),
        "messages": (*TemplateBody.model_fields, "return_token_strs"),
        "content": ("add_special", "with_pieces"),
        "inputs": (),
    }
)


class TokenizeBody(TemplateBody, RequestBody):
    """POST /tokenize: a text, or a conversation for the chat template."""

    model: str | None = optional_field("The served model; /v1/models lists it.")
    prompt: str | None = optional_field("A text.")
    messages: Messages | None = optional_field("A conversation, in place of a text.")
    return_token_strs: bool | None = optional_field("Return also the vocabulary's text of each token.")
    content: str | None = optional_field("llama.cpp's name of prompt.")
    add_special: bool | None = optional_field("With content: add begin and end tokens; false by default.")
    parse_special: Any = unsupported_field(True)  # noqa: FBT003 (a value of the field)
    with_pieces: bool | None = optional_field("With content: return id and text of each token.")
    inputs: str | None = optional_field("TGI's name of prompt: the answer is a list of tokens with their places.")

    def check(self) -> None:
        """Raises RequestError unless there is one of prompt, messages, content and inputs, with its own fields."""
        forms = [name for name in _FORMS if getattr(self, name) is not None]
        if len(forms) != 1:
            raise RequestError(f"give one of {', '.join(_FORMS)}", "prompt")
        for name in self.model_fields_set - {"model", forms[0], *_FORMS[forms[0]]}:
            if getattr(self, name) is not None and name != "parse_special":
                raise RequestError(f"{name} does not apply to {forms[0]}; leave it out", name)


class DetokenizeBody(RequestBody):
    """POST /detokenize."""

    model: str | None = optional_field("The served model; /v1/models lists it.")
    tokens: TokenIds = Field(description="Token ids.")


def token_routes(service: Service) -> APIRouter:
    """The routes of the tokenizer."""
    router = APIRouter(tags=["Tokens"], route_class=service.request_bodies.route_class())

    @router.post("/tokenize", response_model=None)
    async def tokenize(body: TokenizeBody, request: Request) -> Response:
        """Return the token ids of a text or a conversation."""
        await service.served_model(request, body.model)
        body.check()
        return await service.thread_pool.run(caller_of(request).tenant, lambda: _json(_tokenized(body, service)))

    @router.post("/detokenize", response_model=None)
    async def detokenize(body: DetokenizeBody, request: Request) -> Response:
        """Return the text of token ids, special tokens included, by vLLM's name and llama.cpp's."""
        await service.served_model(request, body.model)
        num_bytes = 2 * CHARACTERS_PER_TOKEN * len(body.tokens)
        if num_bytes > LARGE:  # the text can be much longer than the body
            await hold(request.state.body_bytes, num_bytes)
        return await service.thread_pool.run(
            caller_of(request).tenant, lambda: _json(dict.fromkeys(("prompt", "content"), _text(body.tokens, service)))
        )

    return router


def _tokenized(body: TokenizeBody, service: Service) -> object:
    if body.inputs is not None:
        service.check_size(body.inputs, "inputs")
        return [
            {"id": id, "text": body.inputs[start:stop], "start": start, "stop": stop}
            for id, start, stop in service.tokenizer.encode_with_places(body.inputs)
        ]
    if body.content is not None:
        service.check_size(body.content, "content")
        ids = service.tokenizer.encode(body.content, add_special_tokens=bool(body.add_special))
        if body.with_pieces:
            return {"tokens": [{"id": id, "piece": service.tokenizer.token_text(id)} for id in ids]}
        return {"tokens": ids}
    if body.prompt is None:
        messages = template_messages(body.messages or ())
        service.metrics.count_unknown_fields("messages", num_unknown_fields(body.messages or ()))
        rendering = rendering_of(body)
        rendering.check_size(messages, service)
        ids = rendering.tokenize(messages, service.tokenizer).ids
    else:
        service.check_size(body.prompt, "prompt")
        ids = service.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    pieces = service.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": service.max_model_len, "tokens": ids, "token_strs": pieces}


def _text(tokens: list[int], service: Service) -> str:
    for token in (min(tokens, default=0), max(tokens, default=0)):
        if not 0 <= token < service.vocab_size:
            raise out_of_vocabulary(token, service.vocab_size, "tokens")
    return service.tokenizer.decode(tokens)


def _json(value: object) -> Response:
    return Response(encode(value), media_type="application/json")
