"""A model with recurrent states at start-up: its state blocks, the kernels' requirements, and options."""

import pytest
from hybrid_shape import BLOCK_BYTES, STATE_KIND, STATE_LAYERS

from quire.config import EngineOptions
from quire.core.states import StateGroup
from quire.errors import ConfigError, DoesNotFit
from quire.models.description import ModelDescription
from quire.planner.plan import what_would_fit
from quire.planner.setup import find_model, plan_engine
from quire.startup import build
from quire.startup.build import prepare
from tests.planner.test_simulation import PROFILE

OPTIONS = {"memory": "1GiB", "max_num_seqs": 8, "kernels": "reference", "dtype": "float32"}


@pytest.fixture
def hybrid(monkeypatch):
    """The embedded model, as if it had layers with a recurrence."""
    monkeypatch.setattr(ModelDescription, "state_layers", property(lambda self: STATE_LAYERS))


def prepared(lines=None, **options):
    report = (lambda line: None) if lines is None else lines.append
    return prepare(EngineOptions(**(OPTIONS | options)), report=report, progress=lambda done, total: None)


def test_a_model_with_states_gets_a_block_for_each_row_and_snapshots(hybrid):
    lines = []
    made = prepared(lines)
    states = made.cache.states
    assert states == StateGroup(18, STATE_KIND, "float32", states.num_blocks, 9, BLOCK_BYTES)
    assert states.num_blocks > 8
    (line,) = (line for line in lines if line.startswith("states "))
    assert f"one for each of 8 rows, {states.num_blocks - 8} snapshots" in line


@pytest.mark.parametrize(
    ("options", "max_pending"),
    [
        ({}, 9),
        ({"speculation": "off"}, 1),
        ({"num_speculative_tokens": 3}, 4),
        ({"speculative_config": '{"method": "ngram", "num_speculative_tokens": 5}'}, 6),
    ],
)
def test_a_block_has_room_for_drafts_and_one_token(hybrid, options, max_pending):
    states = prepared(**options).cache.states
    assert states.max_pending == max_pending
    assert states.bytes_per_block == 18 * STATE_KIND.numbers(max_pending) * 4


def test_states_in_bfloat16_take_half_the_memory(hybrid):
    states = prepared(state_dtype="bfloat16").cache.states
    assert (states.dtype, states.bytes_per_block) == ("bfloat16", BLOCK_BYTES // 2)


def test_without_a_prefix_cache_there_are_blocks_of_rows_only(hybrid):
    assert prepared(enable_prefix_caching=False).cache.states.num_blocks == 8


def test_swapped_sequences_have_state_blocks_in_host_memory(hybrid):
    made = prepared(swap_space="100MiB")
    states, (group,) = made.cache.states, made.cache.groups
    assert states.num_host_blocks > 0
    share = states.num_host_blocks / states.num_blocks
    assert group.num_host_blocks / group.num_blocks == pytest.approx(share, abs=1 / states.num_blocks)


def test_kernels_are_asked_for_the_kind_of_state(hybrid, monkeypatch):
    asked = []
    choose = build.choose_schemes
    monkeypatch.setattr(build, "choose_schemes", lambda *args: (asked.append(args[-1].state_kind), choose(*args))[1])
    prepared()
    assert asked == [STATE_KIND]


def test_too_little_memory_for_states_says_what_to_lower(hybrid):
    with pytest.raises(DoesNotFit, match="Raise memory, or lower max_num_seqs"):
        prepared(max_num_seqs=128)


def test_a_model_without_states_has_none_and_refuses_their_type():
    assert prepared().cache.states is None
    with pytest.raises(ConfigError, match="state_dtype 'bfloat16': the model has no recurrent states; leave it out"):
        prepared(state_dtype="bfloat16")
    with pytest.raises(ConfigError, match="state_dtype: Invalid enum value 'float16'"):
        prepared(state_dtype="float16")


# Plans


def test_a_plan_from_the_config_has_the_states_of_an_engine_with_weights(hybrid, tmp_path):
    real = prepared()
    file = tmp_path / "demo.json"
    PROFILE.save(file)
    planned = plan_engine(EngineOptions(**OPTIONS), str(file))
    assert [line for line in planned.memory.lines if line.name == "states"] == [real.plan.lines[2]]
    assert planned.setup.cache.states == real.cache.states


def test_steps_on_a_named_device_take_time_for_the_states_of_each_row(hybrid, monkeypatch):
    options = EngineOptions(max_num_seqs=64)
    with_states = plan_engine(options, "H100").setup.profile
    monkeypatch.undo()
    without = plan_engine(options, "H100").setup.profile
    one, many = (with_states.decode_seconds(rows) - without.decode_seconds(rows) for rows in (1, 32))
    bytes_per_row = 2 * 18 * 4 * STATE_KIND.numbers(0)
    assert one == pytest.approx(bytes_per_row / (0.9 * 3.35e12), rel=0.02)
    assert many == pytest.approx(32 * one)


def test_what_would_fit_names_states_of_half_the_size(hybrid):
    options = EngineOptions(device="L4", max_num_seqs=1000, max_num_batched_tokens=1024)
    with pytest.raises(DoesNotFit):
        plan_engine(options, "L4")
    hints = list(what_would_fit(options, find_model(options)))
    assert "--state-dtype bfloat16" in hints
    assert "--max-num-batched-tokens 1024 --max-num-seqs 64" in hints
