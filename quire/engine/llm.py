"""LLM: generate offline, in this process and thread. Knows prompts and results; the work is the engine's."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike, fspath
from uuid import uuid4

from quire.config import EngineOptions
from quire.engine.build import build
from quire.engine.engine import Engine
from quire.engine.messages import Message
from quire.engine.outputs import Delta, RequestOutput
from quire.engine.progress import TokenProgress
from quire.engine.prompts import Prompt, TokenizedPrompt, listed, tokenize
from quire.engine.tokenizer import Tokenizer
from quire.engine.transcript import Transcript
from quire.errors import RequestError
from quire.params import SamplingParams

log = logging.getLogger(__name__)


class LLM:
    """A model, loaded and ready. Without a name or folder it is the one that ships with quire.

    report(line) is told the memory plan, progress(done, total) how many bytes of weights are loaded.
    options: the fields of EngineOptions, such as dtype, memory, max_model_len, max_num_seqs, seed.
    Raises ConfigError and ModelError. Not to be used by two threads at once.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        memory: str | float | None = None,
        report: Callable[[str], None] = log.info,
        progress: Callable[[int, int], None] = lambda _done, _total: None,
        **options: object,
    ) -> None:
        settings = {"model": None if model is None else fspath(model), **options}
        settings["memory"] = None if memory is None else str(memory)
        built = build(EngineOptions(**settings), report=report, progress=progress)  # type: ignore[arg-type]  # the options are checked by name when called
        self.model_name = built.model_name
        self.max_model_len = built.engine.max_model_len
        self._engine: Engine = built.engine
        self._tokenizer: Tokenizer = built.tokenizer
        self._streaming = False  # whether somebody is reading outputs

    def close(self) -> None:
        """Finish the journal, if there is one; the LLM cannot be used afterwards."""
        self._engine.close()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or several; the results come in the order of the prompts.

        prompts: text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}, or a list of these.
        sampling_params: for all prompts, or one for each. use_tqdm: show progress; None does on a terminal.
        Raises RequestError when any of them cannot be served; then none is.
        """
        tokenized = [tokenize(prompt, self._tokenizer) for prompt in listed(prompts)]
        return self._complete(tokenized, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several. Raises RequestError as `generate` does."""
        one = all(isinstance(message, Mapping) for message in messages)
        conversations = [messages] if one else list(messages)
        variables = {**(chat_template_kwargs or {}), "add_generation_prompt": add_generation_prompt}
        tokenized = [self._tokenize_chat(c, tools, variables) for c in conversations]  # type: ignore[arg-type]  # mypy cannot follow `one`
        return self._complete(tokenized, sampling_params, use_tqdm)

    def stream_chat(self, messages: Sequence[Message], sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Answer one conversation, piece by piece. Giving up the iterator gives up the answer."""
        tokenized = [self._tokenize_chat(messages, None, {})]
        for delta in self._deltas(self._transcripts(tokenized, sampling_params)):
            yield delta.text

    def _tokenize_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None,
        variables: Mapping[str, object],
    ) -> TokenizedPrompt:
        text = self._tokenizer.apply_chat_template(messages, tools, **variables)  # type: ignore[arg-type]  # any template variable
        return TokenizedPrompt(text, self._tokenizer.encode(text, add_special_tokens=False))

    def _complete(
        self,
        prompts: Sequence[TokenizedPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        shown: bool | None,  # noqa: FBT001 (three states: yes, no, where a person watches)
    ) -> list[RequestOutput]:
        transcripts = self._transcripts(prompts, params)
        with TokenProgress(sum(t.params.n for t in transcripts), shown=shown) as progress:
            for delta in self._deltas(transcripts):
                progress.add(delta)
        return [transcript.result() for transcript in transcripts]

    def _transcripts(
        self, prompts: Sequence[TokenizedPrompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Transcript]:
        several = isinstance(params, list | tuple)
        each: list[object] = list(params) if several else [params or SamplingParams()] * len(prompts)  # type: ignore[arg-type]  # mypy cannot follow `several`
        if len(each) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts need as many sampling_params, not {len(each)}")
        now = time.monotonic()
        transcripts = []
        for prompt, one in zip(prompts, each, strict=True):
            if not isinstance(one, SamplingParams):
                raise RequestError(f"sampling_params must be SamplingParams(...), not {type(one).__name__}")
            transcripts.append(Transcript(uuid4().hex, prompt.text, prompt.ids, one, self._tokenizer, now=now))
        return transcripts

    def _deltas(self, transcripts: Sequence[Transcript]) -> Iterator[Delta]:
        """Run the engine until all transcripts are finished; whatever happens, it keeps none of them."""
        if self._streaming:
            raise RequestError("an answer is still being streamed; read it to its end or close it first")
        open_ones = {transcript.request_id: transcript for transcript in transcripts}
        self._streaming = True
        try:
            for transcript in transcripts:
                self._engine.add(transcript.request_id, transcript.prompt_token_ids, transcript.params)
            while open_ones:
                for output in self._engine.step():
                    transcript = open_ones[output.request_id]
                    delta = transcript.add(output, time.monotonic())
                    if delta is None:
                        continue
                    if delta.stopped_after is not None:
                        self._engine.finish(delta.seq_id, delta.stopped_after)
                    yield delta
                open_ones = {name: t for name, t in open_ones.items() if not t.finished}
        finally:
            self._streaming = False
            for request_id in open_ones:
                self._engine.abort(request_id)
