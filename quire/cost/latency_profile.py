"""LatencyProfile: seconds of a Step of one model on one device, computed from rooflines or fitted to measured steps.

    seconds = fixed + (eager, unless the step is replayed) + per_chunk * (chunks + snapshots of states)
        + per_sequence * opened sequences + linear(tokens)
        + sum over KV groups(per_pair * pairs + per_kv_token * reads)

`linear` is a rising curve through points, because products with weights are limited by the reads of the weights for few
tokens, and by arithmetic for many (Williams et al., "Roofline", 2009). Attention of chunks with several tokens is
limited by arithmetic, that of single tokens by the reads of KV. A chunk reads and writes the recurrent state of its
sequence, whatever its length. A step that is not replayed from a capture takes time on the host for each of its layers.
"""

from bisect import bisect_right
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET

from quire.core.step import Step
from quire.cost.devices import Device
from quire.cost.step_time import Calibration, CopySample, DecodeSample, PrefillSample
from quire.cost.step_work import ComputeShape, StepWork, step_work
from quire.errors import ConfigError

_CURVE_TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_MOST_LOGITS = 256  # rows with logits of a step: larger steps are those with prompts
_CALIBRATION_TOKENS = (8, 32, 128, 512)  # of the chunks that an engine would measure at its start
_CALIBRATION_ROWS = (1, 4, 16)


class AttentionTime(msgspec.Struct, frozen=True):
    """Seconds of attention in the layers of one KV group."""

    window: int
    per_pair: float  # of chunks with several tokens
    per_kv_token: float  # positions whose KV a chunk reads


class LatencyProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The coefficients of a step's time, in seconds. See the module."""

    model: str
    device: str
    source: str  # where the coefficients come from, in words
    fixed: float
    eager: float = 0.0  # of a step that is not replayed from a capture
    per_chunk: float
    per_sequence: float = 0.0  # that begins to run: admission, prefix match, sampling state, and its end
    linear: tuple[tuple[float, float], ...]  # (tokens, seconds), both rising
    attention: tuple[AttentionTime, ...]  # per KV group
    seconds_per_byte: float  # of copies between device and host, in each direction; 0: there is no host pool
    error: float = 0.0  # mean relative error of the fit; 0 for a roofline

    @property
    def windows(self) -> tuple[int, ...]:
        """Windows of the KV groups."""
        return tuple(group.window for group in self.attention)

    def seconds(self, work: StepWork) -> float:
        """Predicted seconds of a step."""
        total = self.fixed + self.per_chunk * work.num_chunks + self.linear_seconds(work.num_tokens)
        total += self.per_sequence * work.num_opened + (0.0 if work.is_replayed else self.eager)
        for group, pairs, reads in zip(self.attention, work.pairs, work.kv_tokens, strict=True):
            total += group.per_pair * pairs + group.per_kv_token * reads
        return total

    def step_seconds(self, step: Step) -> float:
        """Predicted seconds of a step without its swaps; 0 for a step without chunks."""
        chunks = step.chunks
        if not len(chunks):
            return 0.0
        seconds = self.seconds(step_work(chunks.starts, chunks.stops, self.windows, len(step.opens.rows)))
        return seconds if step.states is UNSET else seconds + self.state_copy_seconds(len(step.states.snapshot_blocks))

    def state_copy_seconds(self, number: int) -> float:
        """Seconds to copy state blocks within the device, which reads and writes a block as a chunk does."""
        return self.per_chunk * number

    def linear_seconds(self, num_tokens: float) -> float:
        """Seconds of all products with weights. Beyond the last point the curve goes on straight."""
        points = self.linear
        if len(points) == 1:
            return points[0][1] * max(1.0, num_tokens / points[0][0])
        place = min(max(1, bisect_right(points, (num_tokens, inf))), len(points) - 1)
        (left, low), (right, high) = points[place - 1], points[place]
        return max(0.0, low + (high - low) * (num_tokens - left) / (right - left))

    def prefill_seconds(self, num_tokens: int, num_before: int = 0) -> float:
        """Predicted seconds of a step with the first chunk of a new sequence, behind `num_before` cached tokens."""
        return self.seconds(step_work(np.array([num_before]), np.array([num_before + num_tokens]), self.windows, 1))

    def decode_seconds(self, num_rows: int, context: int = 8) -> float:
        """Predicted seconds of a step with one token of each of `num_rows` sequences."""
        return self.seconds(step_work(np.full(num_rows, context), np.full(num_rows, context + 1), self.windows))

    def save(self, path: Path) -> None:
        """Write the profile as JSON. Raises ConfigError if the file cannot be written."""
        try:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error

    def calibration(self, max_tokens: int) -> Calibration:
        """The measurements that an engine would make at its start with chunks of up to `max_tokens` tokens."""
        sizes = [size for size in _CALIBRATION_TOKENS if size <= max_tokens] or [max_tokens]
        prefill = [PrefillSample(size, 0, self.prefill_seconds(size)) for size in sizes]
        prefill += [PrefillSample(size, 8 * size, self.prefill_seconds(size, 8 * size)) for size in sizes[-1:]]
        decode = [DecodeSample(rows, self.decode_seconds(rows)) for rows in _CALIBRATION_ROWS]
        copies = []
        if self.seconds_per_byte:
            copies = [CopySample(2**26, 2**26 * self.seconds_per_byte, 2**26 * self.seconds_per_byte)]
        return Calibration(prefill, decode, copies)


def read_profile(path: Path) -> LatencyProfile:
    """The profile in a file that `quire calibrate` wrote. Raises ConfigError for any other file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=LatencyProfile)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not a file that `quire calibrate` wrote: {error}") from error


def roofline_profile(model: str, device: Device, shape: ComputeShape) -> LatencyProfile:
    """The profile of a device from its peak rates, times the shares of them that it reaches."""
    reached = device.efficiency
    flops = device.peak_flops(shape.compute_dtype) * reached.compute
    attention_flops = device.peak_flops("bfloat16") * reached.attention
    bandwidth = device.bytes_per_second * reached.memory
    linear = tuple(
        (
            float(n),
            max(shape.linear_flops(n, rows) / flops, shape.linear_bytes(n, rows) / bandwidth)
            + n * shape.states.flops_per_token / attention_flops,
        )
        for n, rows in ((n, min(n, _MOST_LOGITS)) for n in _CURVE_TOKENS)
    )
    return LatencyProfile(
        model=model,
        device=device.name,
        source=f"rooflines: {device.source}, at {reached.compute:.0%} of its arithmetic ({reached.attention:.0%} in "
        f"attention), {reached.memory:.0%} of its memory bandwidth, and {1e6 * reached.layer_seconds:.0f} us a layer",
        fixed=reached.layer_seconds * shape.num_layers,
        per_chunk=2 * shape.states.bytes_per_chunk / bandwidth,
        linear=linear,
        attention=tuple(
            AttentionTime(group.window, group.flops_per_pair / attention_flops, group.kv_bytes_per_token / bandwidth)
            for group in shape.attention
        ),
        seconds_per_byte=1 / (device.host_link.bytes_per_second * reached.link),
    )


class StepSample(NamedTuple):
    """A measured step."""

    work: StepWork
    seconds: float


def fit_profile(
    samples: Sequence[StepSample], windows: Sequence[int], *, model: str, device: str, seconds_per_byte: float = 0.0
) -> LatencyProfile:
    """The profile that fits measured steps best: least squares of relative errors, without negative coefficients.

    windows: of the KV groups. Raises ValueError without samples.
    """
    if not samples:
        raise ValueError("there are no measured steps")
    works = [sample.work for sample in samples]
    seconds = np.array([sample.seconds for sample in samples])
    tokens = np.array([work.num_tokens for work in works], float)
    knots = [float(n) for n in _CURVE_TOKENS if n < tokens.max()] + [float(tokens.max())]
    ramps = [np.clip((tokens - low) / (high - low), 0, 1) for low, high in zip([0.0, *knots], knots, strict=False)]
    columns = [
        np.ones(len(works)),
        np.array([not work.is_replayed for work in works], float),
        np.array([work.num_chunks for work in works], float),
        np.array([work.num_opened for work in works], float),
        *ramps,
    ]
    for group in range(len(windows)):
        columns.append(np.array([work.pairs[group] for work in works]))
        columns.append(np.array([work.kv_tokens[group] for work in works], float))
    features = np.stack(columns, 1)
    found = _least_squares(features / seconds[:, None], np.ones(len(samples)))
    # again with errors relative to the fit: relative to noisy measurements, slow steps would count less than fast ones
    fitted = np.maximum(features @ found, seconds / _LARGEST_ERROR)
    found = _least_squares(features / fitted[:, None], seconds / fitted)
    error = float(np.abs(features @ found / seconds - 1).mean())
    (fixed, eager, per_chunk, per_sequence), found = found[:4].tolist(), found[4:]
    heights, groups = np.cumsum(found[: len(knots)]), found[len(knots) :].reshape(-1, 2)
    return LatencyProfile(
        model=model,
        device=device,
        source=f"fitted to {len(samples)} measured steps",
        fixed=fixed,
        eager=eager,
        per_chunk=per_chunk,
        per_sequence=per_sequence,
        linear=tuple(zip(knots, heights.tolist(), strict=True)),
        attention=tuple(
            AttentionTime(window, pair, read) for window, (pair, read) in zip(windows, groups.tolist(), strict=True)
        ),
        seconds_per_byte=seconds_per_byte,
        error=error,
    )


_LARGEST_ERROR = 10.0  # of the first fit
_SWEEPS = 2000
_CONVERGED = 1e-10


def _least_squares(features: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The non-negative x that minimizes |features x - wanted|, by coordinate descent on scaled columns."""
    scale = np.sqrt((features**2).sum(0))
    used = scale > 0
    scaled = features[:, used] / scale[used]
    gram, target = scaled.T @ scaled, scaled.T @ wanted
    x = np.zeros(len(target))
    for _ in range(_SWEEPS):
        largest = 0.0
        for i in range(len(x)):
            changed = max(0.0, x[i] + (target[i] - gram[i] @ x) / gram[i, i])
            largest = max(largest, abs(changed - x[i]))
            x[i] = changed
        if largest < _CONVERGED:
            break
    found = np.zeros(len(scale))
    found[used] = x / scale[used]
    return found
