"""Result types of the public API. Plain data, with vLLM's names."""

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from quire.chat.parts import Message
from quire.core.explanation import Explanation
from quire.core.output import EndCause, FinishReason

Row = TypeVar("Row")


class Logprob(msgspec.Struct, frozen=True, omit_defaults=True):
    """Logprob of a token: natural logarithm, before penalties, temperature and truncation."""

    logprob: float
    rank: int | None  # 1 is the most likely; None for a token of logprob_token_ids that is not among the most likely
    decoded_token: str
    forced: bool = False  # a forced token: its logprob is 0 and not the model's


LogprobRow = dict[int, Logprob]  # one position: its token, then the most likely tokens, then logprob_token_ids


class CompletionOutput(msgspec.Struct):
    """One generated sequence.

    cumulative_logprob: sum over its tokens; None unless logprobs are requested or sequences are ranked.
    finish_reason: "stop", "length", "repetition", "abort" or "error"; None while it goes on. stop_reason: the stop
    string, the pattern of stop_regex or the token id of stop_token_ids that ended it, or "repetition_detected"; None
    after an end token; the message after "error" or "abort". message: content, reasoning and
    tool calls of the text, for `LLM.chat`.
    """

    index: int  # which of the request's n sequences
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[LogprobRow] | None = None  # one row per token
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_offsets: list[int] = []  # per token: number of characters that the tokens before it completed
    num_forced_tokens: int = 0  # forced tokens among token_ids
    num_predicted_tokens: tuple[int, int] = (0, 0)  # accepted and rejected drafts from the prediction
    drafted: list[int] = []  # indices of the accepted drafts in token_ids, forced ones excluded
    message: Message | None = None
    end_token: int | None = None  # the end or stop token that ended the sequence, which is the last of token_ids

    @property
    def matched_stop(self) -> str | int | None:
        """What ended the sequence, as SGLang reports it: a stop string, a pattern of stop_regex, or a token."""
        return _matched_stop(self.finish_reason, self.stop_reason, self.end_token)

    @property
    def finish_info(self) -> dict[str, object] | None:
        """The finish_reason object of SGLang's meta_info; None while the sequence goes on.

        "matched" is `matched_stop`; it is None if the constraint ended the output.
        """
        match self.finish_reason:
            case None:
                return None
            case "length":
                return {"type": "length", "length": len(self.token_ids)}
            case "stop":
                return {"type": "stop", "matched": self.matched_stop}
        return {"type": self.finish_reason, **({} if self.stop_reason is None else {"message": self.stop_reason})}


class RequestMetrics(msgspec.Struct):
    """Times of events in seconds of a monotonic clock; None before the event.

    explanation: the engine's explanation, once the request is finished.
    """

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    queue_seconds: float | None = None  # until its first sequence was admitted; None for beam search
    explanation: Explanation | None = None


class RequestOutput(msgspec.Struct):
    """The result of one prompt."""

    request_id: str
    prompt: str | None  # None if the prompt was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int  # prompt tokens whose KV was reused
    metrics: RequestMetrics
    prompt_logprobs: Sequence[LogprobRow | None] | None = None  # one per prompt token; None up to prompt_logprobs_start


def with_lists(result: RequestOutput) -> RequestOutput:
    """The result with its rows of logprobs as lists, which programs may change, compare and store."""

    def listed(rows: Sequence[Row] | None) -> list[Row] | None:
        return None if rows is None else list(rows)

    outputs = [msgspec.structs.replace(output, logprobs=listed(output.logprobs)) for output in result.outputs]
    return msgspec.structs.replace(result, outputs=outputs, prompt_logprobs=listed(result.prompt_logprobs))


class BeamSearchSequence(msgspec.Struct):
    """One result of a beam search."""

    tokens: list[int]  # prompt and generated tokens, including the end token
    cum_logprob: float  # of the generated tokens
    text: str  # of all tokens, without special tokens
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # as in CompletionOutput


class BeamSearchOutput(msgspec.Struct):
    """The result of one beam search: beam_width sequences, best first."""

    sequences: list[BeamSearchSequence]


class EmbeddingOutput(msgspec.Struct):
    """The embedding of one prompt."""

    embedding: list[float]  # (hidden_size,)


class EmbeddingRequestOutput(msgspec.Struct):
    """The result of one embedded prompt."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool


class ClassificationOutput(msgspec.Struct):
    """The classes of one prompt. probs: one per class; logits if the model's head has no activation."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.probs)


class ClassificationRequestOutput(msgspec.Struct):
    """The result of one classified prompt."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ClassificationOutput
    finished: bool


class ScoringOutput(msgspec.Struct):
    """The score of one pair of texts."""

    score: float


class ScoringRequestOutput(msgspec.Struct):
    """The result of one scored pair. prompt_token_ids: of both texts."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ScoringOutput
    finished: bool


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """The addition of one step to one sequence.

    end: None while the sequence continues. stop_reason: as in CompletionOutput. stopped_after: set when a stop string
    ended the sequence: its number of output tokens, for `Engine.finish`.
    """

    request_id: str
    index: int
    seq_id: int
    text: str
    token_ids: list[int]
    token_offsets: list[int]
    num_forced_tokens: int = 0  # forced tokens among token_ids
    num_predicted_tokens: tuple[int, int] = (0, 0)  # accepted and rejected drafts from the prediction
    drafted: list[int] = []  # as in CompletionOutput
    logprobs: Sequence[LogprobRow] | None = None
    end: EndCause | None = None
    stop_reason: str | int | None = None
    end_token: int | None = None  # as in CompletionOutput
    stopped_after: int | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """What clients get as the finish reason; None while the sequence continues."""
        return None if self.end is None else self.end.finish_reason

    @property
    def matched_stop(self) -> str | int | None:
        """See CompletionOutput."""
        return _matched_stop(self.finish_reason, self.stop_reason, self.end_token)


def _matched_stop(finish_reason: str | None, stop_reason: str | int | None, end_token: int | None) -> str | int | None:
    if finish_reason != "stop":
        return None
    return end_token if stop_reason is None else stop_reason
