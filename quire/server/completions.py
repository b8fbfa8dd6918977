"""/v1/completions: prompts in, text out. Knows OpenAI's format; the work is the service's."""

import time
from collections.abc import AsyncIterator, Sequence
from uuid import uuid4

from fastapi import APIRouter, Request, Response

from quire.engine.generations import Generation
from quire.engine.outputs import CompletionOutput, Delta
from quire.engine.prompts import listed
from quire.engine.transcript import Transcript
from quire.errors import RequestError
from quire.params import SamplingParams
from quire.server.echo import Echo, echo_of
from quire.server.logprobs import LogprobFormat, plain_rows
from quire.server.reply import Reply
from quire.server.respond import respond, shows
from quire.server.schema import CompletionBody
from quire.server.service import Service
from quire.server.sse import DONE, event
from quire.server.usage import UsageFormat

MAX_CHOICES = 1024  # prompts times n


def completion_routes(service: Service) -> APIRouter:
    """The route of text completions."""
    router = APIRouter(tags=["OpenAI"])

    @router.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue a prompt, or each of several."""
        service.check_model(body.model)
        params = body.sampling_params(service.sampling_defaults)
        prompts = listed(body.prompt)
        if not 1 <= len(prompts) * params.n <= MAX_CHOICES:
            raise RequestError(f"the number of prompts times n must be 1 to {MAX_CHOICES}", "prompt")
        each = [params] * len(prompts)
        asked = await service.tokenize(prompts, each, add_special_tokens=body.add_special_tokens)
        answer = CompletionAnswer(service, body, params, await _echoes(service, body, asked))
        reply = await service.start(answer.id, asked)
        return await respond(request, answer, reply, stream=bool(body.stream))

    return router


async def _echoes(service: Service, body: CompletionBody, asked: Sequence[Generation]) -> list[Echo] | None:
    if not body.echo:
        return None

    def work() -> list[Echo]:
        return [
            echo_of(each.prompt, service.tokenizer, skip_special_tokens=each.params.skip_special_tokens)
            for each in asked
        ]

    return await service.aside.run(work)


class CompletionAnswer:
    """OpenAI's text_completion objects for one request.

    What concerns a prompt (its echo, logprobs and ids) comes with the beginning of each of its choices.
    """

    def __init__(
        self, service: Service, body: CompletionBody, params: SamplingParams, echoes: Sequence[Echo] | None
    ) -> None:
        self.id = f"cmpl-{uuid4().hex}"
        self._head = {
            "id": self.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model_name,
        }
        self._with_ids = bool(body.return_token_ids)
        self._with_prompt_logprobs = body.prompt_logprobs is not None
        self._logprobs = LogprobFormat(params, service.tokenizer, as_token_ids=bool(body.return_tokens_as_token_ids))
        self._usage = UsageFormat(body.stream_options)
        self._echoes = echoes
        self._tells_prompt = bool(echoes) or self._with_ids or self._with_prompt_logprobs

    def whole(self, reply: Reply) -> dict[str, object]:
        """Everything at once."""
        choices: list[dict[str, object]] = []
        for place, transcript in enumerate(reply.transcripts):
            for output in transcript.result().outputs:
                choices.append(self._choice(len(choices), output, place, transcript))
        return {**self._head, "choices": choices, "usage": reply.usage()}

    async def events(self, reply: Reply) -> AsyncIterator[bytes]:
        """Server-sent events while the sequences grow."""
        begun: set[int] = set()
        async for deltas in reply.deltas():
            chunks = []
            for delta in deltas:
                index, place = reply.choice(delta), reply.place(delta)
                opening = None if index in begun else reply.transcripts[place]
                if shows(delta, ids=self._with_ids) or (opening and self._tells_prompt):
                    begun.add(index)
                    choice = self._choice(index, delta, place, opening)
                    chunks.append(event({**self._head, "choices": [choice], **self._usage.of_chunk(reply)}))
            yield b"".join(chunks)
        for usage in self._usage.at_end(reply):
            yield event({**self._head, "choices": [], "usage": usage})
        yield DONE

    def _choice(
        self, index: int, part: CompletionOutput | Delta, place: int, opening: Transcript | None
    ) -> dict[str, object]:
        """A sequence, or a part of it; `opening` where it is the first part."""
        echo = self._echoes[place] if self._echoes else None
        choice: dict[str, object] = {
            "index": index,
            "text": (echo.text if echo and opening else "") + part.text,
            "logprobs": self._lists(part, echo, opening),
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if opening and self._with_prompt_logprobs and opening.prompt_logprobs is not None:
            choice["prompt_logprobs"] = plain_rows(opening.prompt_logprobs)
        if self._with_ids:
            choice["token_ids"] = part.token_ids
        if self._with_ids and opening:
            choice["prompt_token_ids"] = opening.prompt.ids
        return choice

    def _lists(
        self, part: CompletionOutput | Delta, echo: Echo | None, opening: Transcript | None
    ) -> dict[str, object] | None:
        echoed = opening.prompt_logprobs if echo and opening else None
        if part.logprobs is None and echoed is None:
            return None
        tokens, rows, offsets = list(part.token_ids), [*(part.logprobs or ())], part.token_offsets
        if echo:
            offsets = [len(echo.text) + offset for offset in offsets]
        if echo and opening and echoed is not None:
            return self._logprobs.completion(opening.prompt.ids + tokens, [*echoed, *rows], echo.offsets + offsets)
        return self._logprobs.completion(tokens, rows, offsets)
