"""Told: what the model did for a request, as its record says. Knows replies and transcripts."""

from collections.abc import Sequence

from quire.engine.output_text import Transcript
from quire.engine.outputs import RequestMetrics
from quire.server.observability.metrics import Ended
from quire.server.observability.request_record import Told


def told_of(transcripts: Sequence[Transcript], finish_reasons: list[str], *, content: bool) -> Told:
    """Of a reply's transcripts. content: whether prompts and what was generated are wanted, too."""
    first = transcripts[0].metrics
    return Told(
        num_prompt_tokens=sum(len(one.prompt.ids) for one in transcripts),
        num_output_tokens=sum(sum(one.num_output_tokens) for one in transcripts),
        num_cached_tokens=sum(one.num_cached_tokens for one in transcripts),
        finish_reasons=finish_reasons,
        params=transcripts[0].params,
        queue_seconds=first.queue_seconds,
        first_token_seconds=_first_token_seconds(first),
        prompts=tuple(one.prompt.text or one.prompt.ids for one in transcripts) if content else (),
        outputs=tuple(output.text for one in transcripts for output in one.result().outputs) if content else (),
    )


def ended_of(transcript: Transcript) -> Ended:
    """The same of one prompt, for metrics."""
    return Ended(
        transcript.metrics,
        len(transcript.prompt.ids),
        transcript.num_cached_tokens,
        transcript.num_output_tokens,
        transcript.params,
    )


def _first_token_seconds(metrics: RequestMetrics) -> float | None:
    return None if metrics.first_token_time is None else metrics.first_token_time - metrics.arrival_time
