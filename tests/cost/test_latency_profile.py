"""The work of steps, rooflines of named devices, and profiles fitted to measured steps."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import random_checkpoints as checkpoints
from hypothesis import given
from hypothesis import strategies as st

import quire
from quire.cost.devices import DEVICES, find_device
from quire.cost.latency_profile import (
    AttentionTime,
    LatencyProfile,
    StepSample,
    fit_profile,
    read_profile,
    roofline_profile,
)
from quire.cost.step_work import AttentionWork, ComputeShape, step_work
from quire.errors import ConfigError
from quire.models.description import describe
from quire.startup.memory_demand import compute_shape_of
from quire.weights.checkpoint import ConfigCheckpoint

OPT_LIKE = ComputeShape(
    num_layers=40,
    compute_dtype="float16",
    projection_parameters=12_590_000_000,
    projection_bytes=25_180_000_000,
    head_parameters=257_000_000,
    head_bytes=514_000_000,
    activation_bytes_per_token=2 * 100_000,
    attention=(AttentionWork(0, 4.0 * 5120 * 40, 819_200),),
)


def arrays(chunks):
    return (np.array(column, np.int32) for column in zip(*chunks, strict=True))


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=6),
    st.sampled_from([0, 1, 5, 16, 100]),
)
def test_pairs_and_reads_are_those_counted_one_by_one(spans, window):
    chunks = [(start, start + length) for start, length in spans]
    work = step_work(*arrays(chunks), [window])
    seen = [
        [range(max(0, at - window + 1) if window else 0, at + 1) for at in range(start, stop)] for start, stop in chunks
    ]
    assert work.num_tokens == sum(map(len, seen))
    assert work.pairs == (sum(len(one) for some in seen for one in some if len(some) > 1),)
    assert work.kv_tokens == (sum(len(set().union(*some)) for some in seen),)


def test_decode_reads_all_weights_once_and_prefill_multiplies_them():
    assert OPT_LIKE.linear_flops(8, 8) == pytest.approx(2 * 8 * 12.847e9)
    assert OPT_LIKE.linear_bytes(8, 8) == pytest.approx(25.694e9 + 8 * 2 * 40 * 200_000)
    assert OPT_LIKE.linear_flops(512, 1) == pytest.approx(2 * (512 * 12.59e9 + 0.257e9))


def test_few_tokens_are_limited_by_memory_and_many_by_arithmetic():
    device = find_device("a100 40gb")
    profile = roofline_profile("opt-13b", device, OPT_LIKE)
    reads = OPT_LIKE.linear_bytes(1, 1) / (0.9 * device.bytes_per_second)
    assert profile.linear_seconds(1) == pytest.approx(reads)
    reached = device.efficiency.compute * 312e12
    assert profile.linear_seconds(2048) == pytest.approx(OPT_LIKE.linear_flops(2048, 256) / reached)
    assert profile.fixed == pytest.approx(40 * device.efficiency.layer_seconds)


def test_the_model_of_a_device_with_a_record_is_within_eight_percent_of_each_recorded_step():
    """The record has prompts of one step, and decode steps at a context of 128 tokens. Half of them were fitted."""
    device = find_device("H100")
    rows = json.loads((Path(__file__).parents[2] / device.record).read_text())["parts"]["step"]["rows"]
    description = describe(ConfigCheckpoint(Path(quire.__file__).parent / "assets/model_configs/llama-3.1-8b.json"))
    profile = roofline_profile("llama-8b", device, compute_shape_of(description, "bfloat16", "bfloat16"))
    compared = 0
    for row in rows:
        found = re.fullmatch(r"llama-8b (decode, batch (?P<rows>\d+)|prefill, (?P<tokens>\d+) tokens)", row["what"])
        if found is None:
            continue
        decode, prompt = found["rows"], found["tokens"]
        seconds = profile.decode_seconds(int(decode), 196) if decode else profile.prefill_seconds(int(prompt))
        assert 1e3 * seconds == pytest.approx(row["ms"], rel=0.08), row["what"]
        compared += 1
    assert compared == 6
    assert [one.name for one in DEVICES.values() if one.record] == ["H100"]


def test_a_mixture_of_experts_reads_more_experts_with_more_tokens():
    shape = ComputeShape(
        num_layers=2,
        compute_dtype="bfloat16",
        projection_parameters=10,
        projection_bytes=20,
        expert_parameters=1000,
        expert_bytes=2000,
        num_experts=64,
        experts_per_token=8,
        num_sparse_layers=2,
        head_parameters=0,
        head_bytes=0,
        activation_bytes_per_token=0,
        attention=(),
    )
    assert shape.linear_flops(1, 0) == 2 * (10 + 8 * 2 * 1000)
    assert shape.linear_bytes(1, 0) == pytest.approx(20 + 8 * 2 * 2000)
    assert shape.linear_bytes(10_000, 0) == pytest.approx(20 + 64 * 2 * 2000)
    assert 8 < shape.distinct_experts(4) < 32


@pytest.mark.parametrize("kind", ["qwen3-gqa", "gemma2", "qwen3-moe"])
def test_the_compute_shape_of_a_model_counts_every_parameter_once(saved, kind):
    folder, theirs = saved(kind)
    description = describe(folder)
    shape = compute_shape_of(description, "float32", "float32")
    experts = shape.expert_parameters * shape.num_experts * shape.num_sparse_layers
    embedding = 0 if description.config.tied else theirs.get_input_embeddings().weight.numel()
    counted = shape.projection_parameters + shape.head_parameters + experts + embedding
    assert counted == sum(weight.numel() for weight in theirs.parameters())
    assert shape.projection_bytes == 4 * shape.projection_parameters
    assert bool(shape.num_experts) == (kind == "qwen3-moe")


def test_layers_that_share_kv_read_it_and_a_table_for_each_layer_is_not_multiplied(saved):
    folder, theirs = saved("gemma4-shared-kv")
    description = describe(folder)
    shape = compute_shape_of(description, "float32", "float32")
    table = theirs.get_parameter("model.embed_tokens_per_layer.weight").numel()
    assert shape.projection_parameters + shape.head_parameters + table == checkpoints.num_stored(theirs)
    assert (shape.num_layers, len(description.kv_layers)) == (6, 3)
    full, window = sorted(shape.attention, key=lambda work: work.window)
    assert (full.window, window.window) == (0, 13)
    # three layers of each kind, with one KV head of 32 or 16 numbers; three of the six read the KV of another
    assert (full.kv_bytes_per_token, window.kv_bytes_per_token) == (3 * 2 * 32 * 4, 3 * 2 * 16 * 4)
    assert full.flops_per_pair == 3 * 2 * 4 * (32 + 32)


def test_low_bit_weights_take_fewer_bytes_and_are_multiplied_as_int8(saved):
    folder, _ = saved("qwen3-gqa")
    description = describe(folder)
    whole = compute_shape_of(description, "bfloat16", "bfloat16")
    coded = compute_shape_of(description, "bfloat16", "fp8_e4m3", description.schemes("int4"))
    assert (whole.compute_dtype, coded.compute_dtype) == ("bfloat16", "int8")
    assert coded.projection_bytes < whole.projection_bytes / 2
    assert coded.attention[0].kv_bytes_per_token < whole.attention[0].kv_bytes_per_token


TRUE = LatencyProfile(
    model="m",
    device="d",
    source="",
    fixed=1e-4,
    eager=1.5e-3,
    per_chunk=2e-6,
    per_sequence=2e-4,
    linear=((1.0, 1e-3), (16.0, 1.2e-3), (256.0, 5e-3)),
    attention=(AttentionTime(0, 2e-9, 4e-8), AttentionTime(32, 1e-9, 2e-8)),
    seconds_per_byte=0.0,
)


def test_a_fit_recovers_the_times_of_steps_that_it_has_not_seen():
    rng = np.random.default_rng(0)

    def sample():
        rows = int(rng.integers(1, 32))
        starts = rng.integers(0, 500, rows)
        lengths = np.where(rng.random(rows) < 0.1, rng.integers(2, 64, rows), 1)
        work = step_work(starts, starts + lengths, TRUE.windows, int(rng.integers(0, 3)))
        return StepSample(work, TRUE.seconds(work))

    noisy = [one._replace(seconds=one.seconds * rng.uniform(0.97, 1.03)) for one in (sample() for _ in range(400))]
    found = fit_profile(noisy, TRUE.windows, model="m", device="d")
    errors = [abs(found.seconds(one.work) / one.seconds - 1) for one in (sample() for _ in range(100))]
    assert np.mean(errors) < 0.03
    assert found.error < 0.04
    assert found.eager == pytest.approx(TRUE.eager, rel=0.1)
    assert found.per_sequence == pytest.approx(TRUE.per_sequence, rel=0.2)
    heights = [seconds for _, seconds in found.linear]
    assert heights == sorted(heights)


def test_a_fit_to_noisy_steps_is_that_of_their_mean():
    rng = np.random.default_rng(1)
    work = step_work(np.array([100] * 4), np.array([101] * 4), TRUE.windows)
    times = TRUE.seconds(work) * rng.lognormal(0, 0.4, 4000)
    found = fit_profile([StepSample(work, seconds) for seconds in times], TRUE.windows, model="m", device="d")
    assert found.seconds(work) == pytest.approx(times.mean(), rel=0.01)


def test_a_latency_profile_gives_the_calibration_of_its_device():
    calibration = TRUE.calibration(max_tokens=128)
    assert [one.num_rows for one in calibration.decode] == [1, 4, 16]
    assert calibration.decode[0].seconds == TRUE.decode_seconds(1)
    assert max(one.num_tokens for one in calibration.prefill) == 128
    assert not calibration.copies


@pytest.mark.parametrize(
    ("name", "hint"),
    [("H1000", "H100"), ("a100", "A100-40GB or A100-80GB"), ("rtx4080", "RTX-4090"), ("", "known: A100-40GB")],
)
def test_an_unknown_device_is_refused_with_the_nearest(name, hint):
    with pytest.raises(ConfigError, match=hint):
        find_device(name)


def test_every_device_has_rates_and_sources():
    for device in DEVICES.values():
        assert find_device(device.name.lower().replace("-", " ")) is device
        assert device.source and device.host_link.source
        assert device.peak_flops("float16") == device.peak_flops("bfloat16") > device.peak_flops("float32")
        assert device.peak_flops("fp8_e4m3") >= device.peak_flops("bfloat16")


def test_a_profile_is_read_as_it_was_written_and_other_files_are_refused(tmp_path):
    file = tmp_path / "m.json"
    TRUE.save(file)
    assert read_profile(file) == TRUE
    file.write_text("{}")
    with pytest.raises(ConfigError, match="not a file that `quire calibrate` wrote"):
        read_profile(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_profile(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be written"):
        TRUE.save(tmp_path / "none" / "m.json")
