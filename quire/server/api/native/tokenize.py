"""/tokenize and /detokenize, with vLLM's bodies."""

from fastapi import APIRouter, Request, Response
from msgspec.json import encode
from pydantic import Field

from quire.errors import RequestError, out_of_vocabulary
from quire.server.api.openai.chat import num_unknown_fields, rendering_of, template_messages
from quire.server.api.openai.schema import Messages, TemplateBody
from quire.server.held_answer import hold
from quire.server.middleware.auth import caller_of
from quire.server.request_params import RequestBody, TokenIds, optional_field
from quire.server.service import CHARACTERS_PER_TOKEN, Service
from quire.tenant_memory import LARGE

_MESSAGE_FIELDS = [name for name in TemplateBody.model_fields if name not in ("add_special_tokens", "tool_choice")]


class TokenizeBody(TemplateBody, RequestBody):
    """POST /tokenize: a text, or a conversation for the chat template."""

    model: str | None = optional_field("The served model; /v1/models lists it.")
    prompt: str | None = optional_field("A text.")
    messages: Messages | None = optional_field("A conversation, in place of a text.")
    return_token_strs: bool | None = optional_field("Return also the vocabulary's text of each token.")


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
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give either a prompt or messages", "prompt")
        return await service.thread_pool.run(caller_of(request).tenant, lambda: _json(_tokenized(body, service)))

    @router.post("/detokenize", response_model=None)
    async def detokenize(body: DetokenizeBody, request: Request) -> Response:
        """Return the text of token ids, special tokens included."""
        await service.served_model(request, body.model)
        num_bytes = CHARACTERS_PER_TOKEN * len(body.tokens)
        if num_bytes > LARGE:  # the text can be much longer than the body
            await hold(request.state.body_bytes, num_bytes)
        return await service.thread_pool.run(
            caller_of(request).tenant, lambda: _json({"prompt": _text(body.tokens, service)})
        )

    return router


def _tokenized(body: TokenizeBody, service: Service) -> dict[str, object]:
    if body.prompt is None:
        messages = template_messages(body.messages or ())
        service.metrics.count_unknown_fields("messages", num_unknown_fields(body.messages or ()))
        rendering = rendering_of(body)
        rendering.check_size(messages, service)
        ids = rendering.tokenize(messages, service.tokenizer).ids
    else:
        for name in _MESSAGE_FIELDS:
            if getattr(body, name) is not None:
                raise RequestError(f"{name} applies to messages only; leave it out with a prompt", name)
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
