"""Service: what all routes share. Knows the engine, the tokenizer and the names; no HTTP formats."""

import time
from collections.abc import AsyncIterator, Callable, Sequence

from quire.core.output import Output
from quire.engine.async_engine import AsyncEngine, EngineStopped, NewRequest, Stream
from quire.engine.build import Built
from quire.engine.outputs import Delta, RequestOutput
from quire.engine.prompts import Prompt, TokenizedPrompt, tokenize
from quire.engine.template_meter import MAX_SIZE, TooMuch, size_of
from quire.engine.tokenizer import Tokenizer
from quire.engine.transcript import Transcript
from quire.errors import RequestError
from quire.params import SamplingParams
from quire.server.aside import Aside
from quire.server.errors import SequenceFailed, UnknownModel
from quire.server.metrics import Metrics

CHARACTERS_PER_TOKEN = 64  # no text of so many and more fits the context; the longest tokens are runs of spaces


class Service:
    """One model, ready to answer."""

    def __init__(self, built: Built, model_name: str | None = None) -> None:
        self.model_name = model_name or built.model_name
        self.max_model_len = built.engine.max_model_len
        self.tokenizer: Tokenizer = built.tokenizer
        self.engine = AsyncEngine(built.engine)
        self.aside = Aside()
        self.metrics = Metrics(self.model_name, lambda: self.engine.health().stats)
        self.created = int(time.time())

    def check_model(self, name: str | None) -> None:
        """Raises UnknownModel unless `name` is served here."""
        if name is not None and name != self.model_name:
            raise UnknownModel(f"the model {name!r:.200} is not served here; this server has {self.model_name!r}")

    def check_length(self, value: object, param: str) -> None:
        """Raises RequestError for JSON with more text than any tokenizer could fit into the context."""
        limit = min(CHARACTERS_PER_TOKEN * self.max_model_len, MAX_SIZE)
        try:
            fits = size_of(value) <= limit
        except TooMuch:
            fits = False
        if not fits:
            raise RequestError(
                f"the {param} hold more than {limit} characters, which cannot fit into the context of "
                f"{self.max_model_len} tokens (max_model_len); shorten the {param}",
                param,
            )

    async def tokenize(self, prompts: Sequence[Prompt]) -> list[TokenizedPrompt]:
        """The ids of prompts, computed aside so that long ones do not hold up streams."""
        for prompt in prompts:
            if isinstance(prompt, str):
                self.check_length(prompt, "prompt")
        return await self.aside.run(lambda: [tokenize(prompt, self.tokenizer) for prompt in prompts])

    async def start(self, request_id: str, prompts: Sequence[TokenizedPrompt], params: SamplingParams) -> "Reply":
        """Queue one generation for each prompt, all or none. Raises RequestError, EngineStopped."""
        now = time.monotonic()
        transcripts = [
            Transcript(f"{request_id}-{i}", prompt.text, prompt.ids, params, self.tokenizer, now=now)
            for i, prompt in enumerate(prompts)
        ]
        stream = await self.engine.generate([NewRequest(t.request_id, t.prompt_token_ids, params) for t in transcripts])
        return Reply(transcripts, stream, self.engine.finish, self.metrics)

    async def close(self) -> None:
        """End the engine and what runs aside. Open streams fail; may be called again."""
        self.aside.close()
        await self.engine.close()


class Reply:
    """The sequences that one HTTP request asked for, while they grow. Close it, finished or not."""

    def __init__(
        self, transcripts: Sequence[Transcript], stream: Stream, finish: Callable[[int, int], None], metrics: Metrics
    ) -> None:
        self.num_choices = sum(transcript.params.n for transcript in transcripts)
        self._transcripts = transcripts
        self._places = {transcript.request_id: i for i, transcript in enumerate(transcripts)}
        self._stream = stream
        self._finish = finish
        self._metrics = metrics
        self._last_tokens: dict[int, float] = {}  # by choice
        self._unfinished = "abort"  # why sequences will have ended that have no reason of their own
        self._closed = False

    def choice(self, delta: Delta) -> int:
        """OpenAI's index: the n sequences of the first prompt, then those of the second, ..."""
        place = self._places[delta.request_id]
        return place * self._transcripts[place].params.n + delta.index

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """What each step adds, until all sequences have ended. Raises SequenceFailed, EngineStopped."""
        while not all(transcript.finished for transcript in self._transcripts):
            try:
                outputs = await anext(self._stream)
            except EngineStopped:
                self._unfinished = "error"
                raise
            now = time.monotonic()
            deltas = [delta for output in outputs if (delta := self._read(output, now)) is not None]
            if deltas:
                yield deltas

    async def results(self) -> list[RequestOutput]:
        """Everything, once all have ended."""
        async for _ in self.deltas():
            pass
        return [transcript.result() for transcript in self._transcripts]

    def usage(self) -> dict[str, object]:
        """Tokens so far, in OpenAI's format."""
        num_prompt = sum(len(transcript.prompt_token_ids) for transcript in self._transcripts)
        num_output = sum(transcript.num_output_tokens for transcript in self._transcripts)
        num_cached = sum(transcript.num_cached_tokens for transcript in self._transcripts)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    def close(self) -> None:
        """Give up what has not ended; its blocks are free within a step. All that ended is counted here."""
        self._stream.close()
        if self._closed:
            return
        self._closed = True
        for transcript in self._transcripts:
            for sequence in transcript.result().outputs:
                self._metrics.sequence_ended(sequence.finish_reason or self._unfinished)
            self._metrics.request_ended(transcript.metrics, time.monotonic())

    def _read(self, output: Output, now: float) -> Delta | None:
        transcript = self._transcripts[self._places[output.request_id]]
        delta = transcript.add(output, now)
        if delta is None:
            return None
        if delta.stopped_after is not None:
            self._finish(delta.seq_id, delta.stopped_after)
        if delta.finish_reason == "error":
            self._unfinished = "error"
            raise SequenceFailed(delta.stop_reason)
        if delta.token_ids:
            choice = self.choice(delta)
            before = self._last_tokens.get(choice)
            self._metrics.tokens_came(transcript.metrics, before, now, len(delta.token_ids))
            self._last_tokens[choice] = now
        return delta
