"""Outputs: what a caller gets back. Plain data, with vLLM's names."""

import msgspec

from quire.core.explanation import Explanation


class Logprob(msgspec.Struct, frozen=True, omit_defaults=True):
    """How likely a token was: natural logarithm, before penalties, temperature and truncation."""

    logprob: float
    rank: int | None  # 1 is the most likely; None where only the token's id was asked about
    decoded_token: str
    forced: bool = False  # a constraint left no choice: its logprob is 0, whatever the model thinks of it


LogprobRow = dict[int, Logprob]  # of one position: its token first, then the most likely ones, then those asked about


class CompletionOutput(msgspec.Struct):
    """One generated sequence.

    cumulative_logprob: the sum over its tokens, where logprobs were asked for or sequences compared.
    finish_reason: "stop", "length", "abort" or "error". stop_reason: the stop string or the id from
    stop_token_ids that ended it; None after an end token; the message after an error.
    """

    index: int  # which of the request's n sequences
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[LogprobRow] | None = None  # one row per token
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_offsets: list[int] = []  # per token: characters of text that were complete before it
    num_forced_tokens: int = 0  # of token_ids, that a constraint forced
    end_token: int | None = None  # the end or stop token that ended it, the last of token_ids

    @property
    def finish_info(self) -> dict[str, object] | None:
        """Why it ended, as SGLang's meta_info tells it; None while it goes on. What was matched is none of a form's."""
        match self.finish_reason:
            case None:
                return None
            case "length":
                return {"type": "length", "length": len(self.token_ids)}
            case "stop":
                return {"type": "stop", "matched": self.end_token if self.stop_reason is None else self.stop_reason}
        return {"type": self.finish_reason, **({} if self.stop_reason is None else {"message": self.stop_reason})}


class RequestMetrics(msgspec.Struct):
    """When things happened: seconds of a monotonic clock; None while they have not.

    explanation: what became of the request in the engine and why, once it is finished.
    """

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    queue_seconds: float | None = None  # until the first of its sequences was admitted; unknown of beam searches
    explanation: Explanation | None = None


class RequestOutput(msgspec.Struct):
    """Everything that came of one prompt."""

    request_id: str
    prompt: str | None  # None where the prompt was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int  # of the prompt, whose KV was reused
    metrics: RequestMetrics
    prompt_logprobs: list[LogprobRow | None] | None = None  # one per token of the prompt; the first ones have none


class BeamSearchSequence(msgspec.Struct):
    """One result of a beam search."""

    tokens: list[int]  # the prompt's and those generated, the end token included
    cum_logprob: float  # of those generated
    text: str  # of all tokens, special ones left out
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # as in CompletionOutput


class BeamSearchOutput(msgspec.Struct):
    """Everything that came of one prompt: beam_width sequences, best first."""

    sequences: list[BeamSearchSequence]


class EmbeddingOutput(msgspec.Struct):
    """What a prompt was pooled to."""

    embedding: list[float]  # (hidden_size,)


class EmbeddingRequestOutput(msgspec.Struct):
    """Everything that came of one prompt to be embedded."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What one step added to one sequence.

    stopped_after: set when a stop string ended the sequence: the number of output tokens that made
    it, which the engine has to be told.
    """

    request_id: str
    index: int
    seq_id: int
    text: str
    token_ids: list[int]
    token_offsets: list[int]
    logprobs: list[LogprobRow] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    stopped_after: int | None = None
