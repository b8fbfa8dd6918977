"""Log of open requests with their delivered outputs, for resubmission after a restart.

After a restart the engine gets every open request again, with the delivered tokens as known tokens. Outputs that it
repeats are dropped, so that the client's stream continues without a gap.
"""

import time
from collections.abc import Iterable, Iterator, Mapping

import msgspec
import numpy as np

from quire.core.output import EndCause, Output
from quire.core.request import KnownOutput, Request
from quire.core.step import Logprobs


class _DeliveredSequence:
    """The delivered part of one sequence."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.cumulative_logprob = 0.0
        self.finished = False
        self.stopped_after: int | None = None  # number of tokens, if a stop string ended it
        self.seq_id: int | None = None  # in the current engine


class _OpenRequest:
    """An open request."""

    def __init__(self, request: Request, arrived: float) -> None:
        self.request = request
        self.arrived = arrived
        searched = request.beams is not None
        self.sequences = [
            _DeliveredSequence() for _ in range(request.params.n if searched else request.params.num_sequences)
        ]
        self.num_delivered_prompt_logprobs = 0  # prompt tokens whose logprobs were delivered
        self.num_repeated_prompt_logprobs = 0  # among them, those that the current engine will repeat
        self.goes_on = False  # whether the current engine got known tokens
        self.num_counted = 0  # prompt tokens that engines have counted as found or computed
        self.num_counted_before = 0  # by engines before the current one
        self.pooled: np.ndarray | None = None  # partial result; delivered when it is complete

    @property
    def finished(self) -> bool:
        return all(sequence.finished for sequence in self.sequences)

    @property
    def has_begun(self) -> bool:
        return any(sequence.token_ids or sequence.finished for sequence in self.sequences)

    @property
    def resubmission(self) -> Request:
        """The request for another engine. Beam search and pooling start over, so they have no known tokens."""
        request = msgspec.structs.replace(self.request, waited=time.monotonic() - self.arrived)
        if not self.has_begun or request.beams is not None or request.pooling:
            return msgspec.structs.replace(request, resumed=True, num_counted=self.num_counted)
        known = tuple(KnownOutput(one.token_ids, one.finished, one.cumulative_logprob) for one in self.sequences)
        params = request.params.changed(prompt_logprobs=None)
        return msgspec.structs.replace(request, params=params, known_outputs=known, resumed=True)


class OpenRequests:
    """Open requests by id, in the order in which they were accepted."""

    def __init__(self) -> None:
        self._entries: dict[str, _OpenRequest] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._entries

    def add(self, requests: Iterable[Request], began: float | None = None) -> None:
        """Add accepted requests. began: when they were sent first, in seconds of the monotonic clock; None: now."""
        began = time.monotonic() if began is None else began
        self._entries.update((request.id, _OpenRequest(request, began - request.waited)) for request in requests)

    def remove(self, request_id: str) -> bool:
        """Remove a request that has ended or was aborted. Returns whether it was open."""
        return self._entries.pop(request_id, None) is not None

    def request(self, request_id: str) -> Request:
        """An open request, as it was accepted."""
        return self._entries[request_id].request

    def num_known(self, request_id: str) -> int:
        """Output tokens of the longest sequence of an open request that were delivered."""
        return max(len(sequence.token_ids) for sequence in self._entries[request_id].sequences)

    def can_pause(self, request_id: str) -> bool:
        """Whether a request is open, and would go on from its known tokens. Beam search and pooling start over."""
        entry = self._entries.get(request_id)
        return entry is not None and entry.request.beams is None and not entry.request.pooling

    def count_from_now(self, request_id: str) -> None:
        """Count deadline and rank of an open request from now on, because its client did not read in between."""
        if request_id in self._entries:
            self._entries[request_id].arrived = time.monotonic()

    def resume(self, request_id: str) -> Request:
        """An open request for resubmission to a new engine, with its known tokens."""
        entry = self._entries[request_id]
        entry.goes_on = entry.has_begun
        entry.num_counted_before = entry.num_counted
        for sequence in entry.sequences:
            sequence.seq_id = None
        entry.num_repeated_prompt_logprobs, entry.pooled = entry.num_delivered_prompt_logprobs, None
        return entry.resubmission

    def record_prompts(self, num_counted: Mapping[str, int]) -> dict[str, int]:
        """Record how many prompt tokens of open requests the engine has counted.

        Returns those of them that are progress of this engine: what engines before it have counted is computed again.
        """
        progress = {}
        for request_id, number in num_counted.items():
            entry = self._entries[request_id]
            entry.num_counted = number
            if number > entry.num_counted_before:
                progress[request_id] = number
        return progress

    def record_output(self, output: Output) -> tuple[Output | None, int | None]:
        """Record an output of the engine. Returns (the output to deliver or None, num_tokens or None).

        num_tokens is set if a stop string ended the sequence after that many tokens and the engine has not ended it
        yet: then the caller must send Finish.
        """
        entry = self._entries.get(output.request_id)
        if entry is None:
            return None, None
        sequence = entry.sequences[output.index]
        sequence.seq_id = output.seq_id
        if sequence.finished:
            return None, None if output.end else sequence.stopped_after
        if entry.goes_on and output.num_cached_tokens:  # KV of its own
            output = msgspec.structs.replace(output, num_cached_tokens=0)
        if output.prompt_logprobs is not None:
            output = self._undelivered(entry, output, output.prompt_logprobs)
        if output.pooled is not None:
            output = _pool(entry, output, output.pooled)
        sequence.token_ids += output.token_ids
        if output.cumulative_logprob is not None:
            sequence.cumulative_logprob = output.cumulative_logprob
        if output.end is not None:
            sequence.finished = True
            self._remove_if_finished(entry)
        return output, None

    def finish(self, request_id: str, index: int, num_tokens: int) -> int | None:
        """End a sequence at a stop string, after `num_tokens` tokens.

        Returns its id in the current engine; None if that is unknown or the sequence had already ended.
        """
        entry = self._entries.get(request_id)
        if entry is None or entry.sequences[index].finished:
            return None
        sequence = entry.sequences[index]
        sequence.finished, sequence.stopped_after = True, num_tokens
        del sequence.token_ids[num_tokens:]
        self._remove_if_finished(entry)
        return sequence.seq_id

    def fail(self, request_id: str, error: str) -> list[Output]:
        """Remove a request, and return the error outputs of its unfinished sequences."""
        entry = self._entries[request_id]
        self.remove(request_id)
        return [
            Output(request_id, index, -1, [], EndCause.ENGINE_LOST, error=error)
            for index, sequence in enumerate(entry.sequences)
            if not sequence.finished
        ]

    def _remove_if_finished(self, entry: _OpenRequest) -> None:
        if entry.finished:
            self.remove(entry.request.id)

    def _undelivered(self, entry: _OpenRequest, output: Output, prompt_logprobs: Logprobs) -> Output:
        """The output without prompt logprobs that were delivered before."""
        size = len(prompt_logprobs.ranks)
        skipped = min(size, entry.num_repeated_prompt_logprobs)
        entry.num_repeated_prompt_logprobs -= skipped
        entry.num_delivered_prompt_logprobs += size - skipped
        return msgspec.structs.replace(output, prompt_logprobs=prompt_logprobs.slice(skipped, size))


def _pool(entry: _OpenRequest, output: Output, pooled: np.ndarray) -> Output:
    """Accumulate pooled states. The output has them only when they are complete, as a new engine starts over."""
    entry.pooled = entry.request.pooling.combine(entry.pooled, pooled)
    return msgspec.structs.replace(output, pooled=None if output.end is None else entry.pooled)
