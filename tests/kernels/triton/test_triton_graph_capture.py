"""CUDA graphs: the memory that they need, computed in advance, and their capture with a fake device."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from changed_kernels import changed
from hypothesis import given
from hypothesis import strategies as st

from quire.config import EngineOptions
from quire.kernels.contract import NotCapturable
from quire.kv_store.host import STAGING_BYTES
from quire.models.description import describe
from quire.startup.memory_demand import memory_profile, shape_of

pytest.importorskip("triton")
from quire.kernels.triton import step_capture
from quire.kernels.triton.kernels import TRITON as kernels


@given(
    most=st.integers(1, 1000), token=st.integers(1, 10**7), logits=st.integers(4, 10**6), scratch=st.integers(0, 10**8)
)
def test_the_line_covers_every_size_that_may_be_recorded(most, token, logits, scratch):
    recorder = step_capture.CudaGraphCapture()
    taken = recorder.capture_memory(most, token, logits, scratch)
    sizes = {recorder.capture_size(number, most) for number in range(1, 1000)} - {None}
    results = {recorder.result_buffer(torch.empty(size, 3, device="meta")).shape[0]: size for size in sizes}
    kept = sum(rows for (rows, _, _) in recorder._results) * logits
    needed = len(sizes) * step_capture.GRAPH_BYTES + max(sizes) * (token + logits) + scratch + kept
    assert set(results) == sizes
    assert needed + step_capture.LIBRARY_BYTES <= taken.bytes
    assert taken.bytes <= 3 * needed + step_capture.LIBRARY_BYTES, "and not without reason"
    assert taken.reason.startswith(f"{len(sizes)} graphs of up to {max(sizes)} tokens")


def test_results_of_neighbouring_sizes_lie_in_one_place():
    recorder = step_capture.CudaGraphCapture()
    seven, eight, nine = (recorder.result_buffer(torch.empty(rows, 5)) for rows in (7, 8, 9))
    assert seven.data_ptr() == eight.data_ptr() != nine.data_ptr()
    assert [x.shape for x in (seven, eight, nine)] == [(7, 5), (8, 5), (9, 5)]
    assert recorder.result_buffer(torch.empty(8, 5, dtype=torch.float16)).dtype == torch.float16


class Device:
    """A fake of torch.cuda. A graph records what is computed during its capture; a replay computes it again."""

    def __init__(self, monkeypatch):
        self.pools, self.captured, self.failure = [], [], None
        device = self

        class Stream:
            def wait_stream(self, other):
                assert isinstance(other, Stream)

        class Graph:
            def replay(self):
                device.captured.append("replayed")

            def pool(self):
                return "pool"

        @contextmanager
        def capture(graph, pool, capture_error_mode):
            assert capture_error_mode == "thread_local", "another thread loads adapters meanwhile"
            device.pools.append(pool)
            if device.failure:
                raise device.failure
            device.captured.append("captured")
            yield

        for name, value in {
            "current_stream": Stream,
            "Stream": Stream,
            "stream": lambda stream: nullcontext(),
            "set_stream": lambda stream: device.captured.append("stream set back"),
            "CUDAGraph": Graph,
            "graph": capture,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


def test_a_graph_is_warmed_up_captured_once_and_leaves_its_result_in_its_place(monkeypatch):
    device, recorder, inputs, calls = Device(monkeypatch), step_capture.CudaGraphCapture(), torch.zeros(3, 2), []

    def compute():
        calls.append(len(device.captured))
        return inputs + len(calls)

    result, play = recorder.capture(compute)
    assert calls == [0, 0, 1], "two warm-ups, and one that is captured"
    assert (result == 3).all()
    play()
    assert device.captured == ["captured", "replayed", "replayed"]
    again, _ = recorder.capture(lambda: inputs + 7)
    assert again.data_ptr() == result.data_ptr()
    assert device.pools == [None, "pool"], "the second shares the memory of the first"


@pytest.mark.parametrize(
    ("failure", "raised"),
    [
        (RuntimeError("operation not permitted when stream is capturing"), NotCapturable),
        (torch.OutOfMemoryError("no memory"), torch.OutOfMemoryError),
    ],
)
def test_failed_captures_raise_not_capturable_or_out_of_memory(monkeypatch, failure, raised):
    device, recorder = Device(monkeypatch), step_capture.CudaGraphCapture()
    device.failure = failure
    with pytest.raises(raised, match=str(failure)):
        recorder.capture(lambda: torch.zeros(1, 2))
    assert device.captured == ["stream set back"]


@pytest.mark.parametrize("enable_lora", [False, True])
@pytest.mark.parametrize("most", [6, 300])
def test_the_demand_of_a_model_counts_it(saved, most, enable_lora):
    description = describe(saved("qwen3-gqa")[0])
    shape = shape_of(description, "float32")
    without, recorded = (
        memory_profile(
            shape,
            EngineOptions(max_num_seqs=most, enable_lora=enable_lora),
            ("float32", "float32"),
            changed(kernels, new_step_capture=capture),
        )
        for capture in (lambda: None, step_capture.CudaGraphCapture)
    )
    assert (without.captured_steps_bytes, without.captured_steps_reason) == (0, "")
    sizes = (description.activations_per_token * 4, description.vocab_size * 4, kernels.SCRATCH_BYTES)
    expected = step_capture.CudaGraphCapture().capture_memory(most, *sizes, 1 + enable_lora)
    assert (recorded.captured_steps_bytes, recorded.captured_steps_reason) == expected
    assert (without.staging_bytes, recorded.staging_bytes) == (0, 0)
    beside = memory_profile(shape, EngineOptions(), ("float32",) * 2, kernels, overlaps_swaps=True)
    assert beside.staging_bytes == 2 * STAGING_BYTES
    number, largest = (6, 16) if most == 6 else (22, 256)
    assert expected.reason.startswith(f"{number * (1 + enable_lora)} graphs of up to {largest} ")
