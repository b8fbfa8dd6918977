"""/v1/completions: prompts in, text out. Knows OpenAI's format; the work is the service's."""

import time
from collections.abc import AsyncIterator, Sequence
from uuid import uuid4

from fastapi import APIRouter, Request, Response

from quire.engine.outputs import CompletionOutput, Delta
from quire.engine.prompts import listed
from quire.errors import RequestError
from quire.params import SamplingParams
from quire.server.logprobs import completion_logprobs
from quire.server.respond import respond
from quire.server.schema import CompletionBody
from quire.server.service import Reply, Service
from quire.server.sse import DONE, event

MAX_CHOICES = 1024  # prompts times n


def completion_routes(service: Service) -> APIRouter:
    """The route of text completions."""
    router = APIRouter(tags=["OpenAI"])

    @router.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue a prompt, or each of several."""
        service.check_model(body.model)
        params = body.sampling_params(logprobs=body.logprobs)
        prompts = listed(body.prompt)
        if not 1 <= len(prompts) * params.n <= MAX_CHOICES:
            raise RequestError(f"the number of prompts times n must be 1 to {MAX_CHOICES}", "prompt")
        answer = CompletionAnswer(service.model_name, params)
        reply = await service.start(answer.id, await service.tokenize(prompts), params)
        return await respond(request, body, answer, reply)

    return router


class CompletionAnswer:
    """OpenAI's text_completion objects for one request."""

    def __init__(self, model_name: str, params: SamplingParams) -> None:
        self.id = f"cmpl-{uuid4().hex}"
        self._head = {"id": self.id, "object": "text_completion", "created": int(time.time()), "model": model_name}
        self._num_logprobs = params.logprobs or 0
        self._offsets: dict[int, int] = {}  # by choice

    def whole(self, sequences: Sequence[CompletionOutput], usage: dict[str, object]) -> dict[str, object]:
        """Everything at once."""
        choices = [
            {
                "index": index,
                "text": sequence.text,
                "logprobs": completion_logprobs(sequence.logprobs, self._num_logprobs, 0)[0],
                "finish_reason": sequence.finish_reason,
                "stop_reason": sequence.stop_reason,
            }
            for index, sequence in enumerate(sequences)
        ]
        return {**self._head, "choices": choices, "usage": usage}

    async def events(self, reply: Reply, *, with_usage: bool) -> AsyncIterator[bytes]:
        """Server-sent events while the sequences grow."""
        usage = {"usage": None} if with_usage else {}
        async for deltas in reply.deltas():
            chunks = [
                {**self._head, "choices": [self._choice(reply.choice(delta), delta)], **usage}
                for delta in deltas
                if delta.text or delta.logprobs or delta.finish_reason
            ]
            yield b"".join(event(chunk) for chunk in chunks)
        if with_usage:
            yield event({**self._head, "choices": [], "usage": reply.usage()})
        yield DONE

    def _choice(self, index: int, delta: Delta) -> dict[str, object]:
        logprobs, self._offsets[index] = completion_logprobs(
            delta.logprobs, self._num_logprobs, self._offsets.get(index, 0)
        )
        return {
            "index": index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
