"""Conversion of a caller's prompts with their parameters to engine requests."""

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple, TypedDict, TypeVar

from quire.chat.answer_text import AnswerText
from quire.config import EngineOptions
from quire.core.adapter import Adapter
from quire.core.request import NO_NAMESPACE, Beams, Namespace, Request, check_length
from quire.core.scheduling_params import DEFAULT_SCHEDULING_PARAMS, Program, Retention, SchedulingParams
from quire.core.step import Pooling
from quire.errors import RequestError, nearest
from quire.params import MAX_TOKENS, SamplingParams
from quire.structured_outputs.fsm.search import PatternSearch, compile_searches
from quire.tokenizer.tokenizer import Tokenizer, bad_word_tokens


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: list[int]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt


class TokenizedPrompt(NamedTuple):
    """A prompt as token ids; `text` is None if the caller gave ids only."""

    text: str | None
    ids: list[int]


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several as a list. A list of integers is one prompt. Raises RequestError for other types."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise RequestError(f"prompts must be a string or a list, not {type(prompts).__name__}", "prompt")
    if prompts and all(_is_token(item) for item in prompts):
        return [list(prompts)]
    return list(prompts)


def tokenize(prompt: Prompt, tokenizer: Tokenizer, *, add_special_tokens: bool = True) -> TokenizedPrompt:
    """The token ids of one prompt. Raises RequestError for a value that is no Prompt.

    add_special_tokens: whether the tokenizer adds its begin and end tokens to text.
    """
    if isinstance(prompt, str):
        return TokenizedPrompt(prompt, tokenizer.encode(prompt, add_special_tokens=add_special_tokens))
    if isinstance(prompt, Mapping):
        return _tokenize_mapping(prompt, tokenizer, add_special_tokens=add_special_tokens)
    if isinstance(prompt, list | tuple) and all(_is_token(token) for token in prompt):
        return TokenizedPrompt(None, _token_ids(prompt))
    raise RequestError("a prompt must be a string or a list of token ids", "prompt")


def template_variables(given: object, own_fields: Sequence[str]) -> dict[str, object]:
    """A caller's chat_template_kwargs. Raises RequestError for one of `own_fields`, which are set elsewhere."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise RequestError("chat_template_kwargs must map names to values", "chat_template_kwargs")
    for name in own_fields:
        if name in given:
            raise RequestError(f"{name} has a field of its own; take it out of chat_template_kwargs", name)
    return dict(given)


def _tokenize_mapping(
    prompt: Mapping[str, object], tokenizer: Tokenizer, *, add_special_tokens: bool
) -> TokenizedPrompt:
    known = ("prompt", "prompt_token_ids")
    for name in prompt:
        if name not in known:
            raise RequestError(f"a prompt has no field {name!r}{nearest(str(name), known)}", "prompt")
    if "prompt_token_ids" in prompt:
        ids, text = prompt["prompt_token_ids"], prompt.get("prompt")
        if not isinstance(ids, list | tuple) or not all(_is_token(token) for token in ids):
            raise RequestError("prompt_token_ids must be a list of whole numbers", "prompt")
        return TokenizedPrompt(text if isinstance(text, str) else None, _token_ids(ids))
    text = prompt.get("prompt")
    if not isinstance(text, str):
        raise RequestError("a prompt object needs a prompt or prompt_token_ids", "prompt")
    return TokenizedPrompt(text, tokenizer.encode(text, add_special_tokens=add_special_tokens))


def _token_ids(prompt: Sequence[int]) -> list[int]:
    """As ints. Raises RequestError for an id below 0 or above MAX_TOKENS; the engine checks the vocabulary size."""
    for token in (min(prompt, default=0), max(prompt, default=0)):
        if not 0 <= token <= MAX_TOKENS:
            raise RequestError(f"a token id must be between 0 and {MAX_TOKENS:,}, not {token!r:.80}", "prompt")
    return list(map(int, prompt))


def _is_token(item: object) -> bool:
    return type(item) is int or (isinstance(item, Integral) and not isinstance(item, bool))  # also numpy's


class Generation(NamedTuple):
    """One truncated prompt with its parameters.

    bad_words, prediction: the tokens of these parameters. stop_regex: the compiled patterns of this parameter.
    new_answer: makes the AnswerText of a sequence, in which stop strings are searched; None: in all text.
    """

    prompt: TokenizedPrompt
    params: SamplingParams
    bad_words: Sequence[Sequence[int]] = ()
    prediction: Sequence[int] = ()
    stop_regex: Sequence[PatternSearch] = ()
    new_answer: Callable[[], AnswerText] | None = None

    def request(
        self,
        request_id: str,
        pooling: Pooling = Pooling.NONE,
        namespace: Namespace = NO_NAMESPACE,
        beams: Beams | None = None,
        scheduling_params: SchedulingParams = DEFAULT_SCHEDULING_PARAMS,
        adapter: Adapter | None = None,
    ) -> Request:
        """The engine's request for this prompt. The arguments are fields of Request."""
        prompt, params = self.prompt.ids, self.params
        about = (request_id, prompt, params, self.bad_words, pooling, namespace, beams, scheduling_params)
        return Request(*about, prediction=self.prediction, adapter=adapter)


def prompt_request_id(request_id: str, index: int) -> str:
    """The engine's request id of the prompt at index `index` of a request with several prompts."""
    return f"{request_id}-{index}"


def prepare_generations(
    prompts: Sequence[TokenizedPrompt],
    params: Sequence[SamplingParams],
    tokenizer: Tokenizer,
    max_model_len: int,
    *,
    keep_begin_and_end: bool = False,
) -> list[Generation]:
    """One Generation per prompt and its parameters.

    keep_begin_and_end: whether a truncated prompt keeps the tokens that the tokenizer puts around every text, if it has
    them.
    Raises RequestError for invalid bad words, a stop_regex that cannot be compiled or an impossible truncation, and
    ContextLengthExceeded for a prompt that does not fit.
    """
    made: list[Generation] = []
    for prompt, one in zip(prompts, params, strict=True):
        same = made and one is made[-1].params  # prompts of a batch share their parameters
        bad_words = made[-1].bad_words if same else bad_word_tokens(one.bad_words, tokenizer)
        kept = _truncate(prompt, one, tokenizer, max_model_len, keep_begin_and_end=keep_begin_and_end)
        check_length(len(kept.ids), one, max_model_len)
        prediction = made[-1].prediction if same else prediction_tokens(one, tokenizer)
        stop_regex = made[-1].stop_regex if same else compile_searches(one.stop_regex)
        made.append(Generation(kept, one, bad_words, prediction[: max_model_len - len(kept.ids)], stop_regex))
    return made


def pooling_params(truncate_prompt_tokens: int | None = None, truncation_side: str = "left") -> SamplingParams:
    """The parameters of a prompt that is pooled: its truncation. Raises RequestError."""
    return SamplingParams(max_tokens=0, truncate_prompt_tokens=truncate_prompt_tokens, truncation_side=truncation_side)


def prediction_tokens(params: SamplingParams, tokenizer: Tokenizer) -> Sequence[int]:
    """The tokens of `params.prediction`, which continues a prompt; empty without one."""
    return () if params.prediction is None else tokenizer.encode(params.prediction, add_special_tokens=False)


def _truncate(
    prompt: TokenizedPrompt,
    params: SamplingParams,
    tokenizer: Tokenizer,
    max_model_len: int,
    *,
    keep_begin_and_end: bool,
) -> TokenizedPrompt:
    """`truncate_prompt_tokens` tokens of a prompt. If tokens are dropped, its text is decoded from the rest.

    Raises RequestError if max_tokens leaves no room for the prompt.
    """
    if params.truncate_prompt_tokens is None:
        return prompt
    length = params.truncate_prompt_tokens
    if length == -1:
        length = max_model_len - (1 if params.max_tokens is None else params.max_tokens)
        if length < 1:
            raise RequestError(
                f"max_tokens ({params.max_tokens}) leaves none of this model's context of {max_model_len} tokens for "
                "the prompt; truncate_prompt_tokens -1 keeps only the tokens that fit; lower max_tokens",
                "max_tokens",
            )
    if len(prompt.ids) <= length:
        return prompt
    begin, end = tokenizer.begin_and_end_ids() if keep_begin_and_end else ([], [])
    ids = _cut(prompt.ids, length, params.truncation_side, begin, end)
    return TokenizedPrompt(None if prompt.text is None else tokenizer.decode(ids), ids)


def _cut(ids: list[int], length: int, side: str, begin: list[int], end: list[int]) -> list[int]:
    """`length` of the ids: those on the left for the side "right". `begin` and `end` stay if the ids have them."""
    room, last = length - len(begin) - len(end), len(ids) - len(end)
    if room < 1 or ids[: len(begin)] != begin or ids[last:] != end:
        return ids[:length] if side == "right" else ids[-length:]
    inner = ids[len(begin) : last]
    return [*begin, *(inner[:room] if side == "right" else inner[-room:]), *end]


_EVICTION_BY_PRIORITY = ("priority", "cost")  # eviction policies that use retention.priority
_KEPT_PRIORITY = 80  # of KV that a request asks to keep: under "cost", eight times the usual value

RetentionLike = Retention | Mapping[str, object]  # a mapping has the fields of Retention
ProgramLike = Program | Mapping[str, object]  # a mapping has the fields of Program
T = TypeVar("T", Retention, Program)


def make_scheduling_params(
    options: EngineOptions,
    priority: int | None = None,
    deadline: float | None = None,
    retention: RetentionLike | None = None,
    program: ProgramLike | None = None,
) -> SchedulingParams:
    """The scheduling parameters of one request; None means the default. options: of the engine.

    Raises RequestError, also for a priority, retention priority or pin that would have no effect with these options.
    Program hints are accepted with any options.
    """
    scheduling_params = SchedulingParams(
        priority=0 if priority is None else priority,
        deadline=deadline,
        retention=Retention() if retention is None else _from_mapping("retention", Retention, retention),
        program=None if program is None else _from_mapping("program", Program, program),
    )
    if scheduling_params.priority and options.policy != "priority":
        raise RequestError(
            f"priority {scheduling_params.priority} needs the policy 'priority', and this engine runs "
            f"{options.policy!r}; leave it out, or start the engine with policy='priority' (--policy priority)",
            "priority",
        )
    _check_retention_supported(scheduling_params.retention, options)
    return scheduling_params


def _has_tree(options: EngineOptions) -> bool:
    return options.enable_prefix_caching and options.prefix_index == "radix"


def _check_retention_supported(retention: Retention, options: EngineOptions) -> None:
    has_tree = _has_tree(options)
    if retention.pin and not has_tree:
        kind = f"the {options.prefix_index} one" if options.enable_prefix_caching else "no prefix cache"
        raise RequestError(
            f"retention.pin needs the radix prefix index, and this engine has {kind}; leave it out, or start the "
            "engine with prefix_index='radix' (--prefix-index radix) and enable_prefix_caching",
            "retention.pin",
        )
    if retention.priority != Retention().priority and not (has_tree and options.eviction in _EVICTION_BY_PRIORITY):
        raise RequestError(
            f"retention.priority {retention.priority} needs eviction 'priority' or 'cost', and this engine evicts by "
            f"{options.eviction!r}; leave it out, or start the engine with eviction='priority' (--eviction priority)",
            "retention.priority",
        )


def kept_for(seconds: float, options: EngineOptions) -> Retention:
    """The retention that prefers KV for this time, if the engine evicts by priorities; else none.

    It is no pin: a client that marks every request must not take the memory of others, and an idle server keeps KV
    in any case, until another request needs the memory.
    """
    if _has_tree(options) and options.eviction in _EVICTION_BY_PRIORITY:
        return Retention(priority=_KEPT_PRIORITY, ttl=seconds)
    return Retention()


def scheduling_params_per_prompt(
    count: int,
    options: EngineOptions,
    *,
    priority: int | Sequence[int] | None,
    deadline: float | Sequence[float | None] | None,
    retention: RetentionLike | Sequence[RetentionLike | None] | None,
    program: ProgramLike | Sequence[ProgramLike | None] | None = None,
) -> list[SchedulingParams]:
    """Scheduling parameters of `count` prompts. A list has one value per prompt; any other value is for all prompts.

    Raises RequestError.
    """
    names = {"priority": priority, "deadline": deadline, "retention": retention, "program": program}
    columns = [_per_prompt(name, value, count) for name, value in names.items()]
    return [make_scheduling_params(options, *values) for values in zip(*columns, strict=True)]


def _from_mapping(name: str, kind: type[T], given: T | Mapping[str, object]) -> T:
    """A `kind` from the same, or from a mapping with its fields. Raises RequestError for unknown names and values."""
    if isinstance(given, kind):
        return given
    if not isinstance(given, Mapping):
        raise RequestError(f"{name} must be {kind.__name__}(...) or a mapping, not {type(given).__name__}", name)
    for field in given:
        if field not in kind.__struct_fields__:
            hint = nearest(str(field), kind.__struct_fields__)
            raise RequestError(f"{name} has no field {field!r:.80}{hint}", name)
    if kind is Program and "id" not in given:
        raise RequestError("program needs an id, which all requests of one run have in common", "program.id")
    return kind(**given)  # type: ignore[arg-type]  # checked by name here, and by value when it is made


def _per_prompt(name: str, value: object, count: int) -> list[Any]:
    """A list with one value per prompt, unchecked. Raises RequestError for a list of another length."""
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{count} prompts need as many values of {name}, not {len(value)}", name)
    return list(value)
