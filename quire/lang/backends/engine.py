"""Backend with an engine in this process, on a thread of its own."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from os import PathLike
from os.path import abspath
from types import MappingProxyType
from typing import Any
from uuid import uuid4

from msgspec import to_builtins

from quire.chat.detect import chat_format
from quire.chat.output import constrained_params, output_format
from quire.config import EngineOptions
from quire.core.adapter import Adapter
from quire.core.request import NO_NAMESPACE
from quire.core.scheduling_params import Program, SchedulingParams
from quire.engine.inputs import TokenizedPrompt, prepare_generations
from quire.engine.output_text import RequestOutputProcessor
from quire.engine.outputs import Delta
from quire.errors import RequestError
from quire.fleet.fleet import Fleet
from quire.lang.backends.backend import Backend, Piece, RoleTexts
from quire.lang.backends.meta import meta_info, token_logprobs
from quire.lang.backends.roles import TemplateRoles, plain_texts
from quire.lang.errors import GenerationFailed
from quire.lang.params import GenParams
from quire.lang.select import ChoicesDecision, ChoicesSamplingMethod, TokenLogprob, common_prefix_len, decide
from quire.lang.state_text import Message, Prompt
from quire.params import SamplingParams
from quire.startup.build import Built, build
from quire.startup.model_info import model_info_of
from quire.structured_outputs.grammar_cache import front_end_cache
from quire.supervisor.engine_handle import EngineThread
from quire.supervisor.health import Health
from quire.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

NO_PATHS: Mapping[str, str] = MappingProxyType({})

_LONG_TEXT = 2**14  # characters; longer texts are tokenized on a thread, so that they do not block the event loop


class EngineBackend(Backend):
    """Backend with a built engine, which it closes at its end.

    hints: whether requests carry program hints. lora_paths: the folders of adapters by their names.
    """

    def __init__(self, built: Built, *, hints: bool = True, lora_paths: Mapping[str, str] = NO_PATHS) -> None:
        self._host = EngineThread(built.engine, model_info_of(built))
        self._host.launch()
        super().__init__(hints=hints)
        self._tokenizer = built.tokenizer
        self._max_model_len = built.max_model_len
        self._chat_format = chat_format(
            built.tokenizer.tool_template, built.options.tool_call_parser, built.options.reasoning_parser
        )
        self._roles = TemplateRoles(self._render)
        self._grammar_checks = front_end_cache(built.options.grammar_backend)
        self._engine = Fleet(self._host)
        self._lora_paths = lora_paths
        self._adapters: dict[str, Adapter] = {}  # those that were read, by name
        try:
            self.loop.run(self._engine.start())
        except BaseException:
            self.close()
            raise

    def health(self) -> Health:
        """Health and metrics of the engine."""
        return self._engine.health()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    async def generate(
        self, prompt: Prompt, params: GenParams, program: Program | None, *, stream: bool
    ) -> AsyncGenerator[Piece]:
        """See Backend. Raises RequestError, EngineStopped, GenerationFailed."""
        sampling, format = sampling_params(params), None
        if params.toolbox is not None:
            format = output_format(
                self._chat_format,
                params.toolbox,
                prompt.text,
                reasons=False,
                special_texts=self._tokenizer.special_texts,
            )
            sampling = constrained_params(format, sampling)
        if sampling.structured_outputs is not None:
            await self._grammar_checks.compiled(NO_NAMESPACE, sampling.structured_outputs)
        transcript = self._transcript(await self._encode(prompt.text), sampling)
        texts = [""] * params.n
        async for delta in self._deltas([transcript], program, params.adapter):
            texts[delta.index] += delta.text
            if stream or delta.finish_reason is not None:
                text, texts[delta.index] = texts[delta.index], ""
                meta = meta_info(transcript, delta.index, params, self._tokenizer)
                if format is not None and delta.finish_reason is not None:
                    meta["tool_calls"] = to_builtins(format.read(transcript.sequence(delta.index).text).calls)
                yield Piece(text, meta, delta.index)

    async def select(
        self,
        prompt: Prompt,
        choices: tuple[str, ...],
        method: ChoicesSamplingMethod,
        program: Program | None,
        *,
        adapter: str | None = None,
    ) -> ChoicesDecision:
        """See Backend. Raises RequestError, EngineStopped, GenerationFailed."""
        before = await self._encode(prompt.text)
        each = [await self._encode(prompt.text + choice) for choice in choices]
        begins = [common_prefix_len(before, ids) for ids in each]
        scores = await self._score(each, begins, program, adapter)
        alone = None
        if method.requires_unconditional_logprobs:
            own = [ids[begin:] for ids, begin in zip(each, begins, strict=True)]
            alone = await self._score(own, [0] * len(own), None, adapter)
        return decide(choices, method, scores, alone)

    async def role_texts(self, roles: tuple[str, ...]) -> RoleTexts:
        """The texts of the model's chat template, or `plain_texts` for a model without one."""
        return await self._roles.texts(roles) if self._tokenizer.has_chat_template else plain_texts(roles)

    async def prefetch(self, text: str, program: Program | None) -> None:
        """Compute the KV of a text."""
        transcript = self._transcript(await self._encode(text), SamplingParams(max_tokens=0))
        async for _ in self._deltas([transcript], program):
            pass

    async def end_program(self, program: str, branch: str | None) -> None:
        """End the branch in the engine, which then evicts its KV first."""
        self._engine.end_program(NO_NAMESPACE.tenant, program, branch)

    async def flush_cache_async(self) -> None:
        """Evict cached KV that no running request uses."""
        await self._engine.flush_cache()

    async def aclose(self) -> None:
        """End the engine."""
        self._grammar_checks.close()
        try:
            await self._engine.close()
        except RuntimeError:  # at interpreter exit no thread can be started
            self._host.wait()

    async def _score(
        self, prompts: Sequence[list[int]], begins: Sequence[int], program: Program | None, adapter: str | None
    ) -> list[list[TokenLogprob]]:
        """The logprobs of each prompt's tokens from index `begins` on. KV of earlier tokens may come from the cache."""
        transcripts = [
            self._transcript(
                ids, SamplingParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=max(begin - 1, 0))
            )
            for ids, begin in zip(prompts, begins, strict=True)
        ]
        async for _ in self._deltas(transcripts, program, adapter):
            pass
        return [
            token_logprobs(ids[begin:], (transcript.prompt_logprobs or [])[begin:], self._tokenizer)
            for ids, begin, transcript in zip(prompts, begins, transcripts, strict=True)
        ]

    def _transcript(self, ids: list[int], params: SamplingParams) -> RequestOutputProcessor:
        (generation,) = prepare_generations(
            [TokenizedPrompt(None, ids)], [params], self._tokenizer, self._max_model_len
        )
        return RequestOutputProcessor(uuid4().hex, generation, self._tokenizer, now=time.monotonic())

    async def _adapter(self, name: str | None) -> Adapter | None:
        """The adapter of this name, which is read at its first use. Raises RequestError, ModelError, EngineStopped."""
        if name is None or name in self._adapters:
            return None if name is None else self._adapters[name]
        if name not in self._lora_paths:
            known = ", ".join(map(repr, self._lora_paths)) or "none"
            raise RequestError(f"the engine has no adapter {name!r:.80}; lora_paths names {known}", "adapter")
        self._adapters[name] = adapter = await self._engine.read_adapter(name, self._lora_paths[name])
        return adapter

    async def _deltas(
        self, transcripts: Sequence[RequestOutputProcessor], program: Program | None, adapter_name: str | None = None
    ) -> AsyncGenerator[Delta]:
        """Submit requests and yield their Deltas until all are finished. Updates the stats."""
        by_id = {transcript.request_id: transcript for transcript in transcripts}
        params, adapter = SchedulingParams(program=program), await self._adapter(adapter_name)
        outputs = await self._engine.generate(
            [one.generation.request(name, scheduling_params=params, adapter=adapter) for name, one in by_id.items()]
        )
        self.stats.num_calls += 1
        try:
            while not all(transcript.finished for transcript in transcripts):
                for output in await anext(outputs):
                    delta = by_id[output.request_id].process_output(output, time.monotonic())
                    if delta is None:
                        continue
                    if delta.stopped_after is not None:
                        self._engine.finish(delta.request_id, delta.index, delta.stopped_after)
                    if delta.finish_reason in ("error", "abort"):
                        raise GenerationFailed(f"the engine ended this request: {delta.stop_reason}")
                    yield delta
        finally:
            outputs.close()
            for one in transcripts:
                self.stats.count(len(one.prompt.ids), sum(one.num_output_tokens), one.num_cached_tokens)

    async def _encode(self, text: str) -> list[int]:
        """The token ids of a text. Special tokens are not added if the text already begins with the bos token."""
        begin = self._tokenizer.special_tokens.get("bos_token", "")
        special = not (begin and text.startswith(begin))
        if len(text) < _LONG_TEXT:
            return self._tokenizer.encode(text, add_special_tokens=special)
        return await asyncio.to_thread(self._tokenizer.encode, text, special)

    async def _render(self, messages: list[Message], *, add_generation_prompt: bool) -> str:
        return self._tokenizer.apply_chat_template(messages, None, add_generation_prompt)


def open_engine(
    *,
    hints: bool = True,
    lora_paths: Mapping[str, str | PathLike[str]] = NO_PATHS,
    **options: Any,  # noqa: ANN401  (EngineOptions checks them)
) -> EngineBackend:
    """Load a model. lora_paths: as in EngineBackend; they turn enable_lora on. options: fields of EngineOptions.

    Raises ConfigError, ModelError.
    """
    if lora_paths:
        options.setdefault("enable_lora", True)
    built = build(EngineOptions(**options), report=log.info, progress=lambda _done, _total: None)
    return EngineBackend(built, hints=hints, lora_paths={name: abspath(path) for name, path in lora_paths.items()})


def sampling_params(params: GenParams) -> SamplingParams:
    """The SamplingParams of a gen. Raises RequestError."""
    return SamplingParams(
        n=params.n,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        stop_regex=params.stop_regex,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        ignore_eos=params.ignore_eos,
        prediction=params.prediction,
        logprobs=params.top_logprobs_num or 0 if params.return_logprob else None,
        prompt_logprobs=(params.top_logprobs_num or 0) if params.returns_prompt_logprobs else None,
        prompt_logprobs_start=max(params.logprob_start_len or 0, 0),
        regex=params.regex,
        json_schema=params.json_schema,
        ebnf=params.ebnf,
    )
