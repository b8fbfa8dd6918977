"""Offline inference in the calling process and thread."""

import json
import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from os import PathLike, fspath
from uuid import uuid4

from quire.chat.detect import chat_format
from quire.chat.output import OutputFormat, constrained_params, output_format
from quire.chat.parts import Part
from quire.chat.tools import Toolbox, toolbox
from quire.config import EngineOptions
from quire.core.adapter import Adapter
from quire.core.output import Output
from quire.core.prompt_progress import PromptProgress
from quire.core.request import NO_NAMESPACE, Beams, Request
from quire.core.scheduling_params import DEFAULT_SCHEDULING_PARAMS, SchedulingParams
from quire.core.step import Pooling
from quire.engine.embeddings import Embedder, EmbeddingBatch
from quire.engine.engine import Engine, EngineStats
from quire.engine.inputs import (
    ProgramLike,
    Prompt,
    RetentionLike,
    TokenizedPrompt,
    as_prompt_list,
    make_scheduling_params,
    pooling_params,
    prepare_generations,
    scheduling_params_per_prompt,
    template_variables,
    tokenize,
)
from quire.engine.lora_requests import LoRARequests, RequestedAdapters
from quire.engine.output_text import RequestOutputProcessor
from quire.engine.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    ClassificationOutput,
    ClassificationRequestOutput,
    CompletionOutput,
    Delta,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    with_lists,
)
from quire.engine.scoring import activation_of, pair_texts, probabilities
from quire.engine.token_progress import TokenProgress
from quire.errors import RequestError
from quire.params import BeamSearchParams, LoRARequest, SamplingParams
from quire.scheduler.beam_search import plan_beams
from quire.startup.build import build
from quire.structured_outputs.backends import check as check_constraint
from quire.tokenizer.messages import Message
from quire.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_STEP_SECONDS = 2.0  # longer than a server's, because no request arrives during a step
_CHAT_ARGUMENTS = ("messages", "tools", "add_generation_prompt", "continue_final_message")  # not template variables


class LLM:
    """A loaded model for offline inference. Without `model` it is the demo model that ships with quire.

    report(line): receives the memory plan. progress(done, total): receives bytes of files as they are downloaded and
    of weights as they are loaded. options: fields of EngineOptions, such as dtype, max_model_len, max_num_seqs, seed.
    step_seconds defaults to 2 here. Raises ConfigError and ModelError. Not thread-safe.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        memory: str | float | None = None,
        swap_space: str | float | None = None,
        report: Callable[[str], None] = log.info,
        progress: Callable[[int, int], None] = lambda _done, _total: None,
        **options: object,
    ) -> None:
        settings = {"model": None if model is None else fspath(model), "step_seconds": _STEP_SECONDS, **options}
        settings["memory"] = None if memory is None else str(memory)
        settings["swap_space"] = None if swap_space is None else str(swap_space)
        if isinstance(options.get("speculative_config"), Mapping):
            settings["speculative_config"] = json.dumps(options["speculative_config"], default=str)
        built = build(EngineOptions(**settings), report=report, progress=progress)  # type: ignore[arg-type]  # the options are checked by name when called
        self.model_name = built.model_name
        self.max_model_len = built.engine.max_model_len
        self.llm_engine: Engine = built.engine
        self._tokenizer: Tokenizer = built.tokenizer
        self._sampling_defaults = built.sampling_defaults
        self._chat_format = chat_format(
            built.tokenizer.tool_template, built.options.tool_call_parser, built.options.reasoning_parser
        )
        self._classification = built.classification
        self._embedder = Embedder(built.embedding)
        self._options = built.options
        self.adapters = RequestedAdapters(self.llm_engine, is_enabled=built.options.enable_lora)
        self._streaming = False  # whether outputs are being read

    def close(self) -> None:
        """Close the journal, if there is one. The LLM cannot be used afterwards."""
        self.llm_engine.close()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    def get_metrics(self) -> EngineStats:
        """Counters and gauges of the engine: sequences, steps, blocks, tokens of prefix matches."""
        return self.llm_engine.stats()

    def get_default_sampling_params(self) -> SamplingParams:
        """The default parameters of `generate` and `chat`, taken from the model's files."""
        return SamplingParams(**self._sampling_defaults)  # type: ignore[arg-type]  # checked by name when called

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        priority: int | Sequence[int] | None = None,
        deadline: float | Sequence[float | None] | None = None,
        retention: RetentionLike | Sequence[RetentionLike | None] | None = None,
        program: ProgramLike | Sequence[ProgramLike | None] | None = None,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or several. Returns the results in the order of the prompts.

        prompts: text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}, or a list of these.
        sampling_params: for all prompts, or one for each; None means `get_default_sampling_params`.
        use_tqdm: show progress; None shows it on a terminal.
        The following are one value for all prompts, or a list with one for each prompt:
        priority: a lower number runs earlier (needs policy="priority"). deadline: seconds after arrival at which the
        last token stops being useful. retention: how long the KV is kept (Retention or a mapping with its fields).
        program: program hints (Program or a mapping with its fields). lora_request: the adapter; None: the model alone.
        Raises RequestError if any prompt cannot be served. Then no prompt is.
        """
        tokenized = [tokenize(prompt, self._tokenizer) for prompt in as_prompt_list(prompts)]
        scheduling_params = self._scheduling_params(len(tokenized), priority, deadline, retention, program)
        return self._complete(
            *(tokenized, sampling_params, use_tqdm),
            scheduling_params=scheduling_params,
            adapters=self.adapters.each(lora_request, len(tokenized)),
        )

    def end_program(self, program: str, branch: str | None = None) -> None:
        """End a branch of a program: no request will continue from the KV that it left. None: all its branches.

        Raises RequestError for an invalid name.
        """
        make_scheduling_params(self._options, program={"id": program, "branch": branch or ""})  # checks the names
        self.llm_engine.end_program(NO_NAMESPACE.tenant, program, branch)

    def chat(  # noqa: PLR0913 (vLLM's arguments, and those of `generate`)
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        tool_choice: str | Mapping[str, object] | None = None,
        parallel_tool_calls: bool | None = None,
        thinking_token_budget: int | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        use_tqdm: bool | None = None,
        priority: int | Sequence[int] | None = None,
        deadline: float | Sequence[float | None] | None = None,
        retention: RetentionLike | Sequence[RetentionLike | None] | None = None,
        program: ProgramLike | Sequence[ProgramLike | None] | None = None,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several. Raises RequestError like `generate`.

        Each result has its `message`: content, reasoning and tool calls. tool_choice, parallel_tool_calls: as in
        OpenAI's chat. thinking_token_budget: most tokens of reasoning.
        priority, deadline, retention, program, lora_request: as in `generate`, for each conversation.
        continue_final_message: the answer continues the last message.
        add_generation_prompt: begin the assistant's turn; None means yes unless continue_final_message is set.
        """
        one = all(isinstance(message, Mapping) for message in messages)
        conversations: Sequence[Sequence[Message]] = [messages] if one else list(messages)  # type: ignore[list-item, arg-type]  # mypy cannot follow `one`
        variables = template_variables(chat_template_kwargs, _CHAT_ARGUMENTS)
        box = toolbox(tools, tool_choice, parallel_tool_calls)
        texts = [
            self._tokenizer.apply_chat_template(
                conversation,
                None if tool_choice == "none" else tools,
                add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,  # type: ignore[arg-type]  # any variable of the template
            )
            for conversation in conversations
        ]
        tokenized = [tokenize(text, self._tokenizer, add_special_tokens=False) for text in texts]
        scheduling_params = self._scheduling_params(len(tokenized), priority, deadline, retention, program)
        each = self._params_per_prompt(len(texts), sampling_params)
        reasons = self._tokenizer.reasons(variables, has_tools=bool(tools))
        formats = [self._output_format(text, one, box, reasons=reasons) for text, one in zip(texts, each, strict=True)]
        params = [
            constrained_params(format, one, thinking_token_budget) for format, one in zip(formats, each, strict=True)
        ]
        adapters = self.adapters.each(lora_request, len(tokenized))
        results = self._complete(
            tokenized, params, use_tqdm, scheduling_params=scheduling_params, formats=formats, adapters=adapters
        )
        for format, result in zip(formats, results, strict=True):
            for output in result.outputs:
                output.message = format.read(output.text)
        return results

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[str]:
        """Iterate over the text of an answer as it is generated. Closing the iterator aborts the request.

        lora_request: the adapter. Raises RequestError like `chat`, and for best_of above n.
        """
        text = self._tokenizer.apply_chat_template(messages)
        prompt = tokenize(text, self._tokenizer, add_special_tokens=False).ids
        yield from self.stream_generate(prompt, sampling_params, lora_request=lora_request)

    def stream_generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, lora_request: LoRARequest | None = None
    ) -> Iterator[str]:
        """Iterate over the text that continues a prompt; otherwise as `stream_chat`."""
        (transcript,) = self._output_processors([tokenize(prompt, self._tokenizer)], sampling_params)
        transcript.params.check_streamable()
        with closing(self._deltas([transcript], adapters=self.adapters.each(lora_request, 1))) as deltas:
            for delta in deltas:
                yield delta.text

    def stream_message(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        on_step: Callable[[PromptProgress], None] = lambda _progress: None,
        lora_request: LoRARequest | None = None,
    ) -> Generator[tuple[list[Part], int]]:
        """Iterate over the parts of an answer as they come, content apart from reasoning and tool calls.

        Yields (parts, number of tokens) for each step. Closing the iterator aborts the request. on_step: called after
        each step, also while the prompt is computed. lora_request: the adapter. Raises RequestError as `chat`, and for
        best_of above n.
        """
        text = self._tokenizer.apply_chat_template(messages, tools)
        (params,) = self._params_per_prompt(1, sampling_params)
        reasons = self._tokenizer.reasons({}, has_tools=bool(tools))
        format = self._output_format(text, params, toolbox(tools, None, None), reasons=reasons)
        tokenized = [tokenize(text, self._tokenizer, add_special_tokens=False)]
        (transcript,) = self._output_processors(tokenized, constrained_params(format, params), [format])
        transcript.params.check_streamable()
        parser = format.new_parser()
        adapters = self.adapters.each(lora_request, 1)
        with closing(self._deltas([transcript], on_step=on_step, adapters=adapters)) as deltas:
            for delta in deltas:
                parts = parser.push(delta.text)
                if delta.finish_reason is not None:
                    parts += parser.finish()
                yield parts, len(delta.token_ids)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool | None = None,
        lora_request: LoRARequests = None,
    ) -> list[BeamSearchOutput]:
        """The most likely continuations of one prompt or several, in the order of the prompts.

        prompts, use_tqdm, lora_request: as in `generate`. Raises RequestError like `generate`, and for a beam_width
        that is too large for the vocabulary.
        """
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params must be BeamSearchParams(...), not {type(params).__name__}")
        engine = self.llm_engine
        beams = plan_beams(params, vocab_size=engine.vocab_size, num_end_tokens=engine.num_end_tokens)
        tokenized = [tokenize(prompt, self._tokenizer) for prompt in as_prompt_list(prompts)]
        adapters = self.adapters.each(lora_request, len(tokenized))
        results = self._complete(tokenized, params.sampling_params(), use_tqdm, beams, adapters=adapters)
        return [BeamSearchOutput([self._beam(result, one, params) for one in result.outputs]) for result in results]

    def embed(  # noqa: PLR0913 (how the vectors are made, and vLLM's arguments)
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        truncation_side: str = "left",
        use_tqdm: bool | None = None,
        lora_request: LoRARequests = None,
    ) -> list[EmbeddingRequestOutput]:
        """One vector per prompt, pooled from the last layer's hidden states after the final norm.

        The model's files say how (docs/models.md); pooling and normalize (to length 1) say otherwise. Without such
        files it is the state of the last token ("last"), of length 1. dimensions: numbers that are kept, where the
        model allows it. prompt_name: of a prompt of the model in front of each text; "": none. lora_request: as in
        `generate`. Raises RequestError like `generate`, and EmbeddingFailed if the model failed.
        """
        embedder = self._embedder
        how = embedder.pooling(pooling)
        embedder.check_dimensions(dimensions)
        texts = embedder.texts(as_prompt_list(prompts), prompt_name)
        tokenized = [tokenize(prompt, self._tokenizer) for prompt in texts]
        params = pooling_params(truncate_prompt_tokens, truncation_side)
        batch = list(self._pool(tokenized, how, params, "embedding", use_tqdm, lora_request))
        vectors = embedder.vectors(batch, normalize=normalize, dimensions=dimensions)
        return [
            EmbeddingRequestOutput(
                request_id=one.request_id,
                prompt_token_ids=one.prompt_token_ids,
                outputs=EmbeddingOutput(vector.tolist()),
                finished=True,
            )
            for one, vector in zip(batch, vectors, strict=True)
        ]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_activation: bool = True,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | None = None,
        lora_request: LoRARequests = None,
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of the classes for each prompt, by the model's classification head.

        use_activation: False returns logits. lora_request: as in `generate`. Raises RequestError like `generate`, and
        for a model without such a head; EmbeddingFailed if the model failed.
        """
        tokenized = [tokenize(prompt, self._tokenizer) for prompt in as_prompt_list(prompts)]
        params = pooling_params(truncate_prompt_tokens)
        batch = self._pool(tokenized, Pooling.CLASS, params, "classifying", use_tqdm, lora_request)
        activation = activation_of(self._classification, used=use_activation)
        return [
            ClassificationRequestOutput(
                request_id=one.request_id,
                prompt_token_ids=one.prompt_token_ids,
                outputs=ClassificationOutput(probabilities(one.state(), activation).tolist()),
                finished=True,
            )
            for one in batch
        ]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        use_activation: bool = True,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """The score of each pair of texts: one of `data_1` with each of `data_2`, or as many of both.

        A model with a classification head of one class reads both texts in one prompt. Of other models the score is the
        similarity of two embeddings, by default their cosine. use_activation: False returns the logit of such a head.
        lora_request: one for all pairs. Raises as `classify`.
        """
        firsts, seconds = ([data] if isinstance(data, str) else list(data) for data in (data_1, data_2))
        pairs = pair_texts(firsts, seconds, self._tokenizer, self._classification, self._embedder)
        params = pooling_params(truncate_prompt_tokens)
        batch = list(self._pool(pairs.prompts, pairs.pooling, params, "scoring", use_tqdm, lora_request))
        scores = pairs.scores(batch, self._embedder, activation_of(self._classification, used=use_activation))
        return [
            ScoringRequestOutput(
                request_id=batch[second].request_id,
                prompt_token_ids=[token for place in {first: 0, second: 0} for token in batch[place].prompt_token_ids],
                outputs=ScoringOutput(score),
                finished=True,
            )
            for (first, second), score in zip(pairs.pairs, scores, strict=True)
        ]

    def _pool(
        self,
        prompts: Sequence[TokenizedPrompt],
        pooling: Pooling,
        params: SamplingParams,
        work: str,
        shown: bool | None,  # noqa: FBT001 (three states: yes, no, only on a terminal)
        lora_request: LoRARequests,
    ) -> EmbeddingBatch:
        """Compute the vectors of prompts. params: their truncation. work: label of the progress bar."""
        each = [params] * len(prompts)
        asked = prepare_generations(prompts, each, self._tokenizer, self.max_model_len, keep_begin_and_end=True)
        batch = EmbeddingBatch(asked, pooling, adapters=self.adapters.each(lora_request, len(asked)))
        progress = TokenProgress(work, len(asked), shown=shown)
        outputs = self._outputs(batch.requests, batch.is_open, progress.show_prompts)
        with progress, closing(outputs):
            for output in outputs:
                one = batch.process_output(output)
                if one.finish_reason is not None:
                    progress.update(len(one.prompt_token_ids), 1)
        return batch

    def _complete(
        self,
        prompts: Sequence[TokenizedPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        shown: bool | None,  # noqa: FBT001 (three states: yes, no, only on a terminal)
        beams: Beams | None = None,
        scheduling_params: Sequence[SchedulingParams] = (),
        formats: Sequence[OutputFormat] = (),
        adapters: Sequence[Adapter | None] = (),
    ) -> list[RequestOutput]:
        transcripts = self._output_processors(prompts, params, formats)
        with TokenProgress("generating", sum(t.params.num_sequences for t in transcripts), shown=shown) as progress:
            for delta in self._deltas(transcripts, beams, scheduling_params, progress.show_prompts, adapters):
                progress.update(len(delta.token_ids), int(delta.finish_reason is not None))
        return [with_lists(transcript.result()) for transcript in transcripts]

    def _output_format(
        self, prompt: str, params: SamplingParams, box: Toolbox | None, *, reasons: bool
    ) -> OutputFormat:
        return output_format(
            self._chat_format,
            box,
            prompt,
            reasons=reasons,
            special_texts=self._tokenizer.special_texts,
            skip_special_tokens=params.skip_special_tokens,
        )

    def _beam(self, result: RequestOutput, output: CompletionOutput, params: BeamSearchParams) -> BeamSearchSequence:
        tokens = result.prompt_token_ids + output.token_ids
        ended = output.finish_reason == "stop"
        end = self._tokenizer.token_text(tokens[-1]) if ended and params.include_stop_str_in_output else ""
        return BeamSearchSequence(
            tokens=tokens,
            cum_logprob=output.cumulative_logprob or 0.0,
            text=self._tokenizer.decode(tokens[:-1] if ended else tokens, skip_special_tokens=True) + end,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
        )

    def _params_per_prompt(
        self, count: int, params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if isinstance(params, list | tuple):
            each = list(params)
        else:
            each = [params or self.get_default_sampling_params()] * count
        if len(each) != count:
            raise RequestError(f"{count} prompts need as many sampling_params, not {len(each)}")
        for one in each:
            if not isinstance(one, SamplingParams):
                raise RequestError(f"sampling_params must be SamplingParams(...), not {type(one).__name__}")
        return each

    def _output_processors(
        self,
        prompts: Sequence[TokenizedPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        formats: Sequence[OutputFormat] = (),
    ) -> list[RequestOutputProcessor]:
        """formats: one for each prompt, if stop strings are searched in answers only."""
        each = self._params_per_prompt(len(prompts), params)
        for constraint in {one.structured_outputs for one in each}:
            if constraint is not None:
                check_constraint(constraint, self._options.grammar_backend)
        now = time.monotonic()
        asked = prepare_generations(prompts, each, self._tokenizer, self.max_model_len)
        for place, format in enumerate(formats):
            asked[place] = asked[place]._replace(new_answer=format.new_answer)
        return [RequestOutputProcessor(uuid4().hex, generation, self._tokenizer, now=now) for generation in asked]

    def _scheduling_params(
        self,
        count: int,
        priority: int | Sequence[int] | None,
        deadline: float | Sequence[float | None] | None,
        retention: RetentionLike | Sequence[RetentionLike | None] | None,
        program: ProgramLike | Sequence[ProgramLike | None] | None,
    ) -> list[SchedulingParams]:
        names = {"priority": priority, "deadline": deadline, "retention": retention, "program": program}
        return scheduling_params_per_prompt(count, self._options, **names)  # type: ignore[arg-type]  # each has its own type

    def _deltas(
        self,
        transcripts: Sequence[RequestOutputProcessor],
        beams: Beams | None = None,
        scheduling_params: Sequence[SchedulingParams] = (),
        on_step: Callable[[PromptProgress], None] = lambda _progress: None,
        adapters: Sequence[Adapter | None] = (),
    ) -> Generator[Delta]:
        """Run the engine until all requests are finished, and yield what each step adds.

        beams: beam search instead of sampling. scheduling_params, adapters: one for each request. on_step: called after
        each step.
        """
        by_id = {transcript.request_id: transcript for transcript in transcripts}
        each = scheduling_params or [DEFAULT_SCHEDULING_PARAMS] * len(transcripts)
        own = adapters or [None] * len(transcripts)
        requests = [
            transcript.generation.request(name, beams=beams, scheduling_params=one, adapter=adapter)
            for (name, transcript), one, adapter in zip(by_id.items(), each, own, strict=True)
        ]
        with closing(self._outputs(requests, lambda name: not by_id[name].finished, on_step)) as outputs:
            for output in outputs:
                transcript = by_id[output.request_id]
                delta = transcript.process_output(output, time.monotonic())
                if delta is None:
                    continue
                if delta.stopped_after is not None:
                    self.llm_engine.finish(delta.seq_id, delta.stopped_after)
                if transcript.finished:
                    transcript.metrics.explanation = self.llm_engine.explain(output.request_id)
                yield delta

    def _outputs(
        self, requests: Sequence[Request], is_open: Callable[[str], bool], on_step: Callable[[PromptProgress], None]
    ) -> Generator[Output]:
        """Run the engine until no request is open. Open requests are aborted on an error or when closed early."""
        if self._streaming:
            raise RequestError("an answer is still being streamed; read it to its end or close it first")
        self._streaming = True
        open_ids = [request.id for request in requests]
        try:
            for request in requests:
                self.llm_engine.add(request)
            while open_ids:
                outputs = self.llm_engine.step()
                on_step(self.llm_engine.prompt_progress)
                yield from outputs
                open_ids = [name for name in open_ids if is_open(name)]
        finally:
            self._streaming = False
            for name in open_ids:  # has no effect on a request that has ended or was never added
                self.llm_engine.abort(name)
