"""Scaled RoPE frequencies equal those of transformers bit for bit, for any parameters."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire.models.config_fields import Fields
from quire.models.rope_config import ContextLengths, RopeRule, read_ropes

TRAINED = 8192
FACTORS = st.floats(1.0, 60.0, allow_nan=False)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
@given(data=st.data())
def test_frequencies_are_those_of_transformers(kind, data):
    rope = {"rope_type": kind, "factor": data.draw(FACTORS), "rope_theta": data.draw(st.floats(100.0, 1e7))}
    if kind == "llama3":
        low = data.draw(st.floats(0.5, 4.0))
        rope |= {"low_freq_factor": low, "high_freq_factor": low + data.draw(st.floats(0.5, 8.0))}
    if kind == "yarn":
        rope |= {"beta_slow": data.draw(st.floats(0.5, 2.0)), "beta_fast": data.draw(st.floats(8.0, 64.0))}
        rope["truncate"] = data.draw(st.booleans())
    if kind != "linear":
        rope["original_max_position_embeddings"] = data.draw(st.integers(64, TRAINED))
    head_dim = 2 * data.draw(st.integers(4, 64))
    config = LlamaConfig(head_dim=head_dim, max_position_embeddings=TRAINED, rope_parameters=dict(rope))
    expected, magnitude = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    fields = Fields({"rope_parameters": rope}, Path("model"))
    found = read_ropes(fields, fields.resolve(RopeRule()), head_dim, ContextLengths(TRAINED, None)).full
    assert torch.equal(found.frequencies(), expected)
    assert found.magnitude == magnitude
