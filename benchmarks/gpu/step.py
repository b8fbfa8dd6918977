"""Time of a model's whole steps in quire, beside its lower bound and the part that the host adds.

The bound is the larger of two times: reading the step's weights and KV at the measured read bandwidth, and its
operations at the measured rate of matrix products. Host time is the time of a decode step beyond its captured step and
its other work on the device (copies, sampling), with two steps in flight.
"""

import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.cpu.checkpoints import SHAPES, weight_bytes
from benchmarks.gpu import clock
from benchmarks.gpu.models import model_folder
from benchmarks.gpu.part import Part
from benchmarks.gpu.processes import Settings
from quire.config import EngineOptions
from quire.core.output import Output
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.kernels.triton import kernels
from quire.kernels.triton.step_capture import CudaGraphCapture
from quire.params import SamplingParams
from quire.startup.build import build

REPLAYS = 32
PROFILED = 8  # steps
NUM_SHOWN_KERNELS = 8  # slowest kernels in the row


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements."""

    batches: tuple[int, ...]
    prompt: int
    prefills: tuple[int, ...]
    warm_up: int  # steps
    windows: int
    steps: int  # per window
    spare: int  # extra tokens per output: early sequences decode while later prompts are computed
    rounds: int  # measured prompts, after one warm-up


USUAL = Sizes((1, 64, 8, 256), 128, (8192, 2048), warm_up=20, windows=3, steps=32, spare=50, rounds=3)
TINY = Sizes((1,), 4, (8,), warm_up=1, windows=1, steps=1, spare=1, rounds=1)


def measure(part: Part, settings: Settings) -> None:
    """Rows of decode steps and prefill, for each shape."""
    sizes = TINY if settings.tiny else USUAL
    for shape in settings.shapes:
        _shape(part, settings, shape, sizes)
        gc.collect()
        if settings.device.startswith("cuda"):
            part.attempt(f"{shape}, freeing", torch.cuda.empty_cache)


def _shape(part: Part, settings: Settings, shape: str, sizes: Sizes) -> None:
    loaded: list[Steps] = []
    part.attempt(f"{shape}, loading", lambda: loaded.append(Steps(part, settings, shape, sizes)))
    for steps in loaded:
        for batch in sizes.batches:
            part.attempt(f"{shape} decode, batch {batch}", lambda s=steps, b=batch: s.decode(b))
        for tokens in sizes.prefills:
            part.attempt(f"{shape} prefill, {tokens} tokens", lambda s=steps, t=tokens: s.prefill(t))
        if not steps.on_gpu:
            part.skip(f"{shape}, host time", "it is the time beside a CUDA graph")
            return
        for batch in sizes.batches:  # last: profiling once may slow down later steps
            part.attempt(f"{shape} decode, batch {batch}, host time", lambda s=steps, b=batch: s.host(b))


class Kept(CudaGraphCapture):
    """Captured steps, and the function that replays each, by its number of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.plays: dict[int, Callable[[], None]] = {}

    def capture(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """See StepCapture."""
        result, play = super().capture(compute)
        self.plays[len(result)] = play
        return result, play


class Steps:
    """An engine with a model of one shape."""

    def __init__(self, part: Part, settings: Settings, shape: str, sizes: Sizes) -> None:
        self.part = part
        self.shape = shape
        self.sizes = sizes
        self.on_gpu = settings.device.startswith("cuda")
        self.config = SHAPES[shape]()
        self.vocab = self.config.vocab_size
        begin = time.monotonic()
        folder = model_folder(shape, settings)
        made = time.monotonic()
        self.recordings: list[Kept] = []
        self.engine = self._engine(folder, settings)
        self._weights(folder)
        part.row(
            f"{shape}, loading",
            making_s=made - begin,
            loading_s=time.monotonic() - made,
            weight_gb=weight_bytes(folder) / 1e9,
        )

    def _engine(self, folder: Path, settings: Settings) -> Engine:
        options = EngineOptions(
            model=str(folder),
            dtype="bfloat16",
            device=settings.device,
            kernels="triton",
            steps_in_flight=2,
            speculation="off",
            memory="128MiB" if settings.tiny else None,
            max_num_seqs=max(self.sizes.batches),
            max_num_batched_tokens=max(self.sizes.prefills),
            max_model_len=max(self.sizes.prefills) + self.sizes.prompt,
            step_seconds=1e9,
        )

        def kept() -> Kept:
            self.recordings.append(Kept())
            return self.recordings[-1]

        with patch.object(kernels, "CudaGraphCapture", kept):
            return build(options, report=lambda line: None, progress=lambda done, total: None).engine

    def _weights(self, folder: Path) -> None:
        """Set bytes that a decode step reads, and bytes of the weights that each prompt token is multiplied with."""
        head = 2 * self.vocab * self.config.hidden_size
        tied = self.config.tie_word_embeddings
        self.read_bytes = weight_bytes(folder) - (0 if tied else head)
        self.multiplied_bytes = self.read_bytes - head
        head_dim = getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads
        layers = self.config.num_hidden_layers
        self.kv_bytes = 4 * layers * self.config.num_key_value_heads * head_dim  # per token
        self.flops_per_pair = 4 * layers * self.config.num_attention_heads * head_dim

    def decode(self, batch: int) -> None:
        """`batch` sequences that each compute one token per step."""
        sizes = self.sizes
        self._decoding(batch, sizes.warm_up + sizes.windows * sizes.steps)
        seconds = []
        for _ in range(sizes.windows):
            self._wait()
            begin = time.perf_counter()
            for _ in range(sizes.steps):
                self._step()
            self._wait()
            seconds.append((time.perf_counter() - begin) / sizes.steps)
        wall = median(seconds)
        context = sizes.prompt + sizes.warm_up + sizes.windows * sizes.steps // 2
        what = f"{self.shape} decode, batch {batch}"
        self.part.row(what, ms=1e3 * wall, **self._decode_bound(batch, context, wall))
        if self.on_gpu:
            self.part.attempt(f"{what}, replay", lambda: self._replayed(what, batch, wall))
        self._finish()

    def _decoding(self, batch: int, steps: int) -> None:
        """Compute `batch` prompts and the warm-up steps. At least `steps` steps in all have tokens to generate."""
        self._start(batch, self.sizes.prompt, steps + self.sizes.spare)
        computed: set[int] = set()
        while len(computed) < batch and self.engine.has_work:
            computed |= {output.seq_id for output in self._step() if output.token_ids}
        for _ in range(self.sizes.warm_up):
            self._step()

    def _decode_bound(self, batch: int, context: int, seconds: float) -> dict[str, float]:
        limits = self.part.limits
        if not limits.get("read_gb_per_second") or not limits.get("bf16_tflops"):
            return {}
        num_bytes = self.read_bytes + batch * context * self.kv_bytes
        by_memory = num_bytes / limits["read_gb_per_second"] / 1e9
        by_products = batch * (self.read_bytes + context * self.flops_per_pair) / limits["bf16_tflops"] / 1e12
        bound = max(by_memory, by_products)
        return {"bound_ms": 1e3 * bound, "share_of_bound": bound / seconds}

    def _replayed(self, what: str, batch: int, wall: float) -> None:
        """Time replays of the last captured step."""
        replay = clock.elapsed(self._play(batch), REPLAYS)
        self.part.row(what, replay_ms=1e3 * replay, between_ms=1e3 * (wall - replay))

    def _play(self, batch: int) -> Callable[[], None]:
        plays = [kept.plays.get(kept.capture_size(batch, batch) or 0) for kept in self.recordings]
        play = next((play for play in plays if play is not None), None)
        if play is None:
            raise LookupError(f"no step of {batch} sequences was recorded")
        play()
        return play

    def host(self, batch: int) -> None:
        """Profile steps and replays of one. Other device work of a step is subtracted from its host time."""
        row = self.part.row(f"{self.shape} decode, batch {batch}")
        if "replay_ms" not in row:
            raise LookupError("no recording of it was timed")
        self._decoding(batch, self.sizes.warm_up + PROFILED)
        with profile(activities=[ProfilerActivity.CUDA]) as steps:
            for _ in range(PROFILED):
                self._step()
            self._wait()
        play = self._play(batch)
        self._wait()
        with profile(activities=[ProfilerActivity.CUDA]) as replays:
            for _ in range(PROFILED):
                play()
            self._wait()
        self._finish()
        busy, alone = _busy(steps), _busy(replays)
        rest = max(0.0, sum(busy.values()) - sum(alone.values()))
        host = max(0.0, row["between_ms"] - rest)
        row |= {"other_device_ms": rest, "host_ms": host, "host_share": host / row["ms"]}
        row["kernels_ms"] = dict(sorted(busy.items(), key=lambda item: -item[1])[:NUM_SHOWN_KERNELS])
        self.part.save()

    def prefill(self, tokens: int) -> None:
        """A prompt that one step computes: the median of three runs, after a warm-up."""
        seconds = []
        for _ in range(1 + self.sizes.rounds):
            self._start(1, tokens, 1)
            self._wait()
            begin = time.perf_counter()
            self._finish()
            seconds.append(time.perf_counter() - begin)
        middle = median(seconds[1:])
        flops = self.multiplied_bytes * tokens + self.flops_per_pair * tokens * (tokens + 1) // 2
        flops += 2 * self.vocab * self.config.hidden_size
        figures: dict[str, float] = {"ms": 1e3 * middle, "tflops": flops / middle / 1e12}
        if best := self.part.limits.get("bf16_tflops"):
            figures |= {"bound_ms": flops / best / 1e9, "share_of_bound": flops / best / 1e12 / middle}
        self.part.row(f"{self.shape} prefill, {tokens} tokens", **figures)

    def _start(self, batch: int, prompt: int, output: int) -> None:
        """Queue `batch` prompts of random tokens."""
        self._drop()
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        for i in range(batch):
            ids = [random.randrange(16, self.vocab) for _ in range(prompt)]
            self.engine.add(Request(f"{time.monotonic_ns()}-{i}", ids, params))

    def _step(self) -> list[Output]:
        """Run one step. Raises RuntimeError for a step that failed."""
        outputs = self.engine.step()
        for output in outputs:
            if output.error:
                raise RuntimeError(output.error)
        return outputs

    def _finish(self) -> None:
        while self.engine.has_work:
            self._step()
        self._wait()

    def _drop(self) -> None:
        """Finish the requests that an earlier error left."""
        while self.engine.has_work:
            self.engine.step()

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


def _busy(found: profile) -> dict[str, float]:
    """Milliseconds of each kernel and copy per profiled step."""
    times: dict[str, float] = {}
    for event in found.key_averages():
        kind: Any = event.device_type
        if "CUDA" in str(kind):
            microseconds = getattr(event, "self_device_time_total", 0.0)
            times[event.key[:80]] = times.get(event.key[:80], 0.0) + microseconds / 1e3 / PROFILED
    return times
