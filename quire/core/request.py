"""The request as the control plane uses it: token ids, parameters, scheduling parameters."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from quire.core.adapter import ADAPTER, Adapter
from quire.core.scheduling_params import DEFAULT_SCHEDULING_PARAMS, SchedulingParams
from quire.core.step import Pooling
from quire.errors import ContextLengthExceeded, RequestError, out_of_vocabulary
from quire.params import SamplingParams


class Namespace(msgspec.Struct, frozen=True):
    """A root key of the prefix index. KV that was computed under one key is never read under another.

    tenant: derived by the server from the credential, never from the body. salt: `cache_salt` of the body, which
    divides a tenant further. adapter: digest of the adapter, empty for the model alone. deterministic: deterministic
    requests have roots of their own, because their kernels compute other bits. adapter_start: first position at which
    the adapter applies. Whole blocks before it are in the namespace of the model alone.
    """

    tenant: str = ""
    salt: str = ""
    adapter: str = ""
    deterministic: bool = False
    adapter_start: int = 0

    @property
    def of_model(self) -> "Namespace":
        """The same without the adapter."""
        return msgspec.structs.replace(self, adapter="", adapter_start=0)

    def num_model_blocks(self, block_size: int) -> int:
        """Leading blocks of `block_size` tokens before an adapter that starts behind them; they are in `of_model`."""
        return self.adapter_start // block_size

    def of_block(self, index: int, block_size: int) -> "Namespace":
        """The namespace of a prompt's block, public prefixes aside."""
        return self.of_model if index < self.num_model_blocks(block_size) else self


NO_NAMESPACE = Namespace()  # of the only tenant of a server without keys, and of offline use


class Beams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a beam search."""

    width: int
    num_candidates: int  # most likely next tokens considered per beam
    length_penalty: float
    early_stopping: bool | Literal["never"]


class KnownOutput(msgspec.Struct, frozen=True):
    """Output of one sequence of a resumed request, as the front end got it from an earlier engine."""

    token_ids: list[int] = []  # output tokens
    finished: bool = False  # the sequence has ended and is not computed again
    cumulative_logprob: float = 0.0  # of those tokens, from the last Output; only if sequences are ranked (best_of)


CONSTRAINT = "constraint"  # the prerequisite of a request with a constraint: its grammar


class Request(msgspec.Struct, frozen=True):
    """One prompt and `num_sequences` sequences to generate from it.

    The front end makes it, and `Engine.add` completes it with `resolve`: then neither `params.seed` nor
    `params.max_tokens` is None, so that the output is determined. The front end handles stop strings.

    With `known_outputs`, each sequence continues as if it had been preempted after its known tokens. The known tokens
    count towards `max_tokens` and the other limits.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    bad_words: Sequence[Sequence[int]] = ()  # tokens of `params.bad_words`, each in all its spellings
    pooling: Pooling = Pooling.NONE  # pooled hidden states instead of tokens; `params.max_tokens` is 0 then
    namespace: Namespace = NO_NAMESPACE
    beams: Beams | None = None  # beam search instead of sampling; it returns `params.n` results
    scheduling_params: SchedulingParams = DEFAULT_SCHEDULING_PARAMS
    known_outputs: Sequence[KnownOutput] = ()  # empty for a new request; else one per sequence
    resumed: bool = False  # accepted by an earlier engine; never rejected for the queue limit or its deadline
    eos_token_ids: tuple[int, ...] = ()  # of the model
    prediction: Sequence[int] = ()  # tokens of `params.prediction`
    num_counted: int = 0  # leading prompt tokens that an earlier engine has counted as found or computed
    prerequisites: tuple[str, ...] = ()  # names of what it waits for before it is queued, besides its constraint
    adapter: Adapter | None = None  # None: the model alone; `Engine.add` completes the namespace
    waited: float = 0.0  # seconds since its arrival, for an engine to which it comes later

    @property
    def located(self) -> "Request":
        """The request in the namespace of its KV. An activated adapter that the prompt does not invoke is left out."""
        start = None if self.adapter is None else self.adapter.start_in(self.prompt)
        adapter = None if start is None else self.adapter
        namespace = msgspec.structs.replace(
            self.namespace,
            adapter="" if adapter is None else adapter.digest,
            deterministic=self.params.deterministic,
            adapter_start=start or 0,
        )
        return msgspec.structs.replace(self, adapter=adapter, namespace=namespace)

    @property
    def adapter_name(self) -> str:
        """The name of its adapter; empty for the model alone."""
        return "" if self.adapter is None else self.adapter.name

    @property
    def was_accepted(self) -> bool:
        """Whether an earlier engine has accepted it."""
        return self.resumed or bool(self.known_outputs)

    @property
    def is_constrained(self) -> bool:
        """Whether its output has a constraint."""
        return self.params.has_constraint and self.params.max_tokens != 0

    @property
    def waits_for(self) -> set[str]:
        """Names of all that it waits for before it is queued."""
        constraint = (CONSTRAINT,) if self.is_constrained else ()
        return {*self.prerequisites, *constraint, *(() if self.adapter is None else (ADAPTER,))}

    @property
    def may_end_early(self) -> bool:
        """Whether a token, a stop string, a repetition or a constraint may end a sequence before `max_tokens`."""
        params = self.params
        ends = params.stop_token_ids or (self.eos_token_ids and not params.ignore_eos)
        texts = params.stop or params.stop_regex or params.repetition_detection is not None
        return bool(ends or texts or self.is_constrained)

    @property
    def num_unfinished(self) -> int:
        """Sequences that have not ended."""
        return self.num_sequences - sum(one.finished for one in self.known_outputs)

    @property
    def num_sequences(self) -> int:
        """Sequences to compute; `params.n` of them are returned."""
        return self.params.num_sequences if self.beams is None else self.beams.width

    @property
    def max_tokens(self) -> int:
        """The most tokens to generate per sequence."""
        assert self.params.max_tokens is not None, "the front end resolves max_tokens"
        return self.params.max_tokens

    @property
    def seed(self) -> int:
        """The seed as an unsigned 64-bit Philox key."""
        assert self.params.seed is not None, "the front end resolves the seed"
        return self.params.seed & (2**64 - 1)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Token ids that end a sequence."""
        eos = () if self.params.ignore_eos else self.eos_token_ids
        return frozenset(self.params.stop_token_ids) | frozenset(eos)


def resolve_params(
    prompt: list[int], params: SamplingParams, *, vocab_size: int, max_model_len: int, default_seed: int
) -> SamplingParams:
    """The parameters with `seed` and `max_tokens` filled in, after a check of the prompt against the model's limits.

    Raises RequestError for an empty prompt or token ids out of range, and ContextLengthExceeded for a prompt that does
    not fit into the context.
    """
    if not prompt:
        raise RequestError("the prompt is empty; give at least one token", "prompt")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < vocab_size)
        raise out_of_vocabulary(wrong, vocab_size, "prompt")
    check_length(len(prompt), params, max_model_len)
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids"):
        highest = max(getattr(params, name) or (0,))
        if highest >= vocab_size:
            raise out_of_vocabulary(highest, vocab_size, name)
    room = max_model_len - len(prompt)
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    return params.resolved(max_tokens, default_seed if params.seed is None else params.seed)


def check_known_tokens(request: Request, vocab_size: int) -> None:
    """Raise RequestError for known tokens that no engine can have generated for this request."""
    known = request.known_outputs
    if not known:
        return
    if request.beams is not None or request.pooling is not Pooling.NONE:
        raise RequestError(
            "a beam search or a pooling request starts from the beginning: leave `known_outputs` out, and set "
            "`resumed`",
            "known_outputs",
        )
    if len(known) != request.num_sequences:
        raise RequestError(
            f"known_outputs has {len(known)} entries, and the request {request.num_sequences} sequences: give one for "
            "each",
            "known_outputs",
        )
    for index, one in enumerate(known):
        if len(one.token_ids) > request.max_tokens:
            raise RequestError(
                f"{len(one.token_ids)} tokens are known of sequence {index}, and max_tokens is {request.max_tokens}; "
                "give the parameters that the request had",
                "known_outputs",
            )
        for token in one.token_ids:
            if not 0 <= token < vocab_size:
                raise out_of_vocabulary(token, vocab_size, "known_outputs")


def check_length(num_tokens: int, params: SamplingParams, max_model_len: int) -> None:
    """Raise ContextLengthExceeded if a prompt of `num_tokens` tokens leaves no space for one output token.

    With `max_tokens` 0 the prompt may fill the context.
    """
    least = 0 if params.max_tokens == 0 else 1
    if num_tokens + least > max_model_len:
        output = " with at least one token of output" * least
        raise ContextLengthExceeded(
            f"the prompt has {num_tokens} tokens; this model takes {max_model_len - least}{output}. Shorten the "
            "prompt, set truncate_prompt_tokens, or raise max_model_len",
            "prompt",
        )


_MASK64 = 2**64 - 1


def nth_seed(seed: int, n: int) -> int:
    """The seed of the n-th request of an engine with this seed, 0 to 2^64 - 1. Seeds of different n are unrelated."""
    return _splitmix64(_splitmix64(seed) + n)


def _splitmix64(number: int) -> int:
    """SplitMix64 (Steele, Lea and Flood, 2014)."""
    z = (number * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)
