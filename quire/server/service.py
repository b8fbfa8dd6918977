"""The state that all routes share: one model with its engine, independent of HTTP formats."""

import asyncio
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from fastapi import Request

from quire.chat.detect import chat_format
from quire.core.adapter import Adapter
from quire.core.explanation import Explanation
from quire.core.request import Beams, Namespace, check_length
from quire.core.scheduling_params import DEFAULT_SCHEDULING_PARAMS, SchedulingParams
from quire.engine.embeddings import Embedder
from quire.engine.inputs import Generation, Prompt, prepare_generations, prompt_request_id, tokenize
from quire.engine.output_text import RequestOutputProcessor
from quire.errors import ContextLengthExceeded, RequestError
from quire.fleet.fleet import Fleet
from quire.monitor.update import Watcher
from quire.params import MAX_LOGPROBS, SamplingParams
from quire.server.adapters import Adapters, ServedModel
from quire.server.errors import Busy, UnknownModel
from quire.server.middleware.auth import caller_of
from quire.server.model_names import TAG, ModelNames, is_placeholder
from quire.server.observability.metrics import Metrics
from quire.server.observability.request_record import RequestIds, store_ignored, store_model
from quire.server.options import LoraModule, UnknownFields
from quire.server.reply import Reply
from quire.server.request_body import RequestBodies
from quire.server.request_params import MAX_PROMPTS, RequestBody
from quire.server.thread_pool import ThreadPool
from quire.startup.model_info import ModelInfo
from quire.structured_outputs.grammar_cache import CompilerOverloaded, front_end_cache
from quire.tokenizer.chat_costs import MAX_SIZE, LimitExceeded, size_of
from quire.tokenizer.tokenizer import Tokenizer

T = TypeVar("T")

CHARACTERS_PER_TOKEN = 64  # upper bound; the longest tokens are runs of spaces
_PLAIN = re.compile(r"[a-zA-Z0-9_.-]{1,64}")  # names that a header can have
# bounds of prompts for which tokenization takes less time than the hand-over to a thread under load
_MAX_SHORT = 1024  # characters and token ids together
_MAX_SHORT_PROMPTS = 16


class Service:
    """One served model: engine, tokenizer, metrics, request bodies, thread pool, the memory of each tenant.

    model_names: names that requests may use: see ModelNames.
    always_reports_usage: whether each chunk of a stream of completions or chat has the usage so far. max_logprobs: most
    likely tokens that a request may ask for with each token. lora_modules, lora_dir: adapters, see Adapters.
    disable_any_whitespace: of every constraint without a whitespace_pattern.
    """

    def __init__(  # noqa: PLR0913 (an option each)
        self,
        facts: ModelInfo,
        tokenizer: Tokenizer,
        engine: Fleet,
        model_names: Sequence[str] = (),
        *,
        unknown_fields: UnknownFields = "refuse",
        always_reports_usage: bool = False,
        max_logprobs: int = MAX_LOGPROBS,
        disable_any_whitespace: bool = False,
        lora_modules: Sequence[LoraModule] = (),
        lora_dir: str | None = None,
    ) -> None:
        self.names = ModelNames(model_names, facts.model_name)
        self.model_name = self.names.reported
        self.max_model_len = facts.max_model_len
        self.vocab_size = facts.vocab_size
        self.num_end_tokens = facts.num_end_tokens
        self.embedder = Embedder(facts.embedding)
        self.facts = facts
        self.options = facts.options
        self.cache = facts.cache
        self.sampling_defaults = facts.sampling_defaults
        self.tokenizer = tokenizer
        self.chat_format = chat_format(
            tokenizer.tool_template, facts.options.tool_call_parser, facts.options.reasoning_parser
        )
        self.engine = engine
        self.thread_pool = ThreadPool()
        self.adapters = Adapters(
            engine,
            self.thread_pool,
            model_names=self.names.exact,
            modules=lora_modules,
            folder=None if lora_dir is None else Path(lora_dir),
            is_enabled=facts.options.enable_lora,
        )
        self.memories = engine.memories
        self.request_bodies = RequestBodies(self.max_model_len, self._check_fields, self.memories)
        self.metrics = Metrics(
            self.model_name,
            engine.statuses,
            caches=[handle.model_info.cache for handle in engine.engine_handles],
            max_model_len=self.max_model_len,
            max_loras=facts.options.max_loras if facts.options.enable_lora else 0,
        )
        self._grammar_checks = front_end_cache(facts.options.grammar_backend, self.metrics.observe_grammar_check)
        self._explaining: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by tenant
        self._node_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by tenant
        self.request_ids = RequestIds(self.model_name)
        self.created = int(time.time())
        self._unknown_fields = unknown_fields
        self.always_reports_usage = always_reports_usage
        self._max_logprobs = max_logprobs
        self._disable_any_whitespace = disable_any_whitespace

    async def served_model(
        self, request: Request, name: str | None, param: str = "model", builtin: Sequence[str] = ()
    ) -> ServedModel:
        """What a request's model name stands for: the served model, or an adapter. Stored in the request's record.

        None: the model. builtin: patterns of names that clients of the route have built in; they stand for the model.
        Raises UnknownModel, also for an adapter that the key may not use. See `Adapters.resolve`.
        """
        if name is None:
            return ServedModel(self.model_name)
        for one in dict.fromkeys((name, name.removesuffix(TAG))):
            if self.names.has(one):
                return ServedModel(self.model_name)
            adapter = await self.adapters.resolve(one, caller_of(request))
            if adapter is not None:
                store_model(request, one)
                return ServedModel(one, adapter)
        if self.names.matches(name):
            return ServedModel(self.model_name)
        if param == "model" and is_placeholder(name, builtin):
            self.ignore(request, "", [param])
            return ServedModel(self.model_name)
        raise UnknownModel(f"the model {name!r:.200} is not served here; this server has {self.names.shown}", param)

    def ignore(self, request: Request, place: str, names: Iterable[str]) -> None:
        """Report what a request has without effect: in its response, in the access log, in the metrics.

        place: the field that has it; "" for a field of the body, with a name from the table of known fields.
        """
        shown = dict.fromkeys(name if _PLAIN.fullmatch(name) else "other" for name in names)
        store_ignored(request, [f"{place}.{name}" if place else name for name in shown])
        for field in dict.fromkeys(place or name for name in shown):
            self.metrics.count_ignored(field)

    @property
    def ignores_unknown_fields(self) -> bool:
        """Whether fields that the server does not know are ignored; else they are refused."""
        return self._unknown_fields == "ignore"

    def _check_fields(self, request: Request, body: RequestBody, ignored: Sequence[str]) -> None:
        """Raises RequestValidationError for an unknown field of the body, unless the server ignores and counts them."""
        self.ignore(request, "", ignored)
        if not self.ignores_unknown_fields:
            body.refuse_unknown_fields()
        self.metrics.count_unknown_fields("body", len(body.unknown_fields))

    @property
    def max_characters(self) -> int:
        """The most characters that fit into the context, for any tokenizer."""
        return min(CHARACTERS_PER_TOKEN * self.max_model_len, MAX_SIZE)

    def check_size(self, value: object, param: str) -> None:
        """Raises ContextLengthExceeded for a JSON value with more text than fits into the context for any tokenizer."""
        limit = self.max_characters
        try:
            fits = size_of(value) <= limit
        except LimitExceeded:
            fits = False
        if not fits:
            raise ContextLengthExceeded(
                f"there are more than {limit:,} characters in {param}, which cannot fit into the context of "
                f"{self.max_model_len} tokens (max_model_len); shorten {param}",
                param,
            )

    async def prepare(self, request: Request, work: Callable[[], T]) -> T:
        """The result of `work`, which grows with the request's body: if that is large, it runs on the thread pool.

        Raises Busy, EngineStopped, and what `work` raises.
        """
        if not request.state.body_bytes.is_large:
            return work()
        return await self.thread_pool.run(caller_of(request).tenant, work)

    async def tokenize(
        self,
        tenant: str,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        *,
        add_special_tokens: bool | None = None,
        keep_begin_and_end: bool = False,
    ) -> list[Generation]:
        """Tokenize prompts; long ones on the thread pool, so that they do not delay streams. One Generation per prompt.

        add_special_tokens: None means True. keep_begin_and_end: as in `prepare_generations`. Raises RequestError, Busy,
        EngineStopped.
        """
        for prompt, one in zip(prompts, params, strict=True):
            if isinstance(prompt, str):
                self.check_size(prompt, "prompt")
            elif one.truncate_prompt_tokens is None:
                check_length(len(prompt), one, self.max_model_len)
        added = add_special_tokens is not False

        def work() -> list[Generation]:
            tokenized = [tokenize(prompt, self.tokenizer, add_special_tokens=added) for prompt in prompts]
            return prepare_generations(
                tokenized, params, self.tokenizer, self.max_model_len, keep_begin_and_end=keep_begin_and_end
            )

        are_short = len(prompts) <= _MAX_SHORT_PROMPTS and sum(map(len, prompts)) <= _MAX_SHORT
        if are_short and not any(one.bad_words or one.stop_regex for one in params):
            return work()
        return await self.thread_pool.run(tenant, work)

    async def start(
        self,
        request_id: str,
        asked: Sequence[Generation],
        namespace: Namespace,
        beams: Beams | None = None,
        scheduling_params: SchedulingParams = DEFAULT_SCHEDULING_PARAMS,
        *,
        adapters: Sequence[Adapter | None] | Adapter | None = None,
        whole: bool = False,
    ) -> Reply:
        """Check the constraints and queue generations, all or none. The engine's id of the i-th is its `part_id`.

        namespace, beams (None: no beam search), scheduling_params: of every generation. adapters: of every generation,
        or a list with that of each; None: the model alone. whole: the outputs are kept until all have come; then the
        reply must be released. Raises RequestError, Busy, EngineStopped.
        """
        each = adapters if isinstance(adapters, Sequence) else [adapters] * len(asked)
        now = time.monotonic()
        for one in asked:
            self._check_logprobs(one.params)
        if self._disable_any_whitespace:
            asked = [_without_free_whitespace(one) for one in asked]
        for constraint in dict.fromkeys(one.params.structured_outputs for one in asked):
            if constraint is not None:
                try:
                    await self._grammar_checks.compiled(namespace, constraint)
                except CompilerOverloaded:
                    raise Busy from None
        transcripts = [
            RequestOutputProcessor(prompt_request_id(request_id, i), one, self.tokenizer, now=now)
            for i, one in enumerate(asked)
        ]
        stream = await self.engine.generate(
            [
                one.generation.request(
                    one.request_id,
                    namespace=namespace,
                    beams=beams,
                    scheduling_params=scheduling_params,
                    adapter=adapter,
                )
                for one, adapter in zip(transcripts, each, strict=True)
            ],
            whole=whole,
        )
        run = partial(self.thread_pool.run, namespace.tenant)
        return Reply(transcripts, stream, self.engine.finish, self.metrics, run)

    def _check_logprobs(self, params: SamplingParams) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            number = getattr(params, name)
            if number is not None and number > self._max_logprobs:
                raise RequestError(f"{name} is {number}; this server allows {self._max_logprobs} at most", name)

    async def explain(self, tenant: str, request_id: str) -> list[Explanation]:
        """The explanations of a request's prompts; empty for an unknown request. Raises EngineStopped.

        tenant: of the caller. The engine looks up one request of each tenant at a time.

        request_id may also be the engine's id of one prompt. The engine drops explanations in the order in which
        prompts end, so any prompt of a batch can be missing. Therefore all possible ids are looked up.
        """
        async with self._explaining[tenant]:
            names = (prompt_request_id(request_id, i) for i in range(MAX_PROMPTS))
            return await self.engine.explain([request_id, *names])

    async def monitor_node(self, watcher: Watcher, node: int, replica: int = 0) -> bytes:
        """A node of a replica's radix trees as JSON, or b"null". Of each tenant one is looked for at a time.

        Raises UnknownReplica and EngineStopped.
        """
        async with self._node_locks[watcher.tenant]:
            return await self.engine.node(watcher, node, replica)

    async def close(self) -> None:
        """Close the thread pools, the grammar checks and the engine. Open streams fail. Can be called again."""
        self.request_bodies.close()
        self.thread_pool.close()
        self._grammar_checks.close()
        await self.engine.close()


def _without_free_whitespace(asked: Generation) -> Generation:
    constraint = asked.params.structured_outputs
    if constraint is None or constraint.whitespace_pattern is not None:
        return asked
    tight = replace(constraint, disable_any_whitespace=True)
    return asked._replace(params=asked.params.changed(structured_outputs=tight))
