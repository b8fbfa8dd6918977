"""RoPE scalings: their frequencies equal those of transformers bit for bit, and every key is read or refused."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quire.errors import ModelError
from quire.models.config_fields import Fields
from quire.models.description import FAMILIES
from quire.models.rope_config import WITHOUT_EFFECT, ContextLengths, HeadDims, RopeRule, read_ropes

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
    found = read_ropes(
        fields, fields.resolve(RopeRule()), HeadDims(head_dim, head_dim), ContextLengths(TRAINED, None)
    ).full
    assert torch.equal(found.frequencies(), expected)
    assert found.magnitude == magnitude


RULE = Fields({}, Path("model")).resolve(RopeRule(allows_partial=True))
HALF = 16  # pairs of a head
DIMS = HeadDims(2 * HALF, 2 * HALF)
BASE: dict[str, dict[str, object]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512},
    "proportional": {},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
    "longrope": {
        "short_factor": [1.0] * HALF,
        "long_factor": [2.0] * HALF,
        "original_max_position_embeddings": 512,
    },
}
# values that differ from those in BASE and from the defaults; without one, a key has a number
OTHER = {
    "rope_type": "no such type",
    "rope_theta": 777.0,
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 1024,
    "short_factor": [3.0] * HALF,
    "long_factor": [4.0] * HALF,
    "truncate": False,
    "mscale": 3.0,
    "mscale_all_dim": 2.0,
    "attention_factor": 1.75,
    "beta_fast": 64.0,
    "beta_slow": 4.0,
    "mrope_section": [4, 6, 6],
}
# keys that models of transformers read beside those of its scalings
KEYS_OF_MODELS = {"llama_4_scaling_beta", "alpha", "short_mscale", "long_mscale", "mrope_section", "attn_factor"}
MEASURED_FROM_THE_CONTEXT = ("default", "linear", "dynamic", "proportional")  # these do not read the original context


def keys_of_transformers(kind):
    """The keys that transformers knows in this rope type."""
    known = []
    config = LlamaConfig(max_position_embeddings=TRAINED)
    config._check_received_keys = lambda _kind, _received, required, optional_keys=(), ignore_keys=(): known.extend(
        [*required, *(optional_keys or ())]
    )
    getattr(config, f"_validate_{kind}_rope_parameters")({"rope_type": kind, **BASE[kind]})
    return set(known)


def ropes(kind, **changes):
    fields = Fields({"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **BASE[kind], **changes}}, Path("model"))
    return [read_ropes(fields, RULE, DIMS, ContextLengths(TRAINED, longest)) for longest in (256, None)]


def test_every_rope_type_of_transformers_is_read_or_refused():
    for kind in {*ROPE_INIT_FUNCTIONS, "default"} - BASE.keys():
        fields = Fields({"rope_parameters": {"rope_type": kind, "factor": 2.0}}, Path("model"))
        with pytest.raises(ModelError, match=f"rope_type '{kind}' is not supported"):
            read_ropes(fields, RULE, DIMS, ContextLengths(TRAINED, None))


@pytest.mark.parametrize("kind", BASE)
def test_every_key_of_transformers_changes_the_rotation_or_is_refused(kind):
    every = KEYS_OF_MODELS.union(*(keys_of_transformers(some) for some in BASE))
    read = set()
    for key in every:
        changes = {key: OTHER.get(key, 3.0)} | ({"mscale": 3.0} if key == "mscale_all_dim" else {})
        if (kind, key) == ("yarn", "short_factor"):  # early Phi-3 checkpoints call longrope so
            changes["long_factor"] = 3.0
        try:
            found = ropes(kind, **changes)
        except ModelError as error:
            assert any(name in str(error) for name in changes)
            continue
        if key in WITHOUT_EFFECT or (key == "original_max_position_embeddings" and kind in MEASURED_FROM_THE_CONTEXT):
            assert found == ropes(kind)
        elif key == "mscale":  # counts only together with mscale_all_dim
            assert found == ropes(kind) != ropes(kind, mscale=3.0, mscale_all_dim=2.0)
        else:
            assert found != ropes(kind), key
            read.add(key)
    assert read | {"rope_type"} >= keys_of_transformers(kind) - {"mscale"} - set(WITHOUT_EFFECT)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta = 0.1"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 1000.0}}, "alpha = 1000.0 is not supported"),
        ({"rope_scaling": {"type": "default", "factor": 8.0}}, "factor = 8.0 has no meaning"),
        ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "full_attention = .* is not supported"),
        ({"rope_parameters": {"full_attention": {}, "sliding_attention": {}}}, "must describe all layers alike"),
    ],
)
def test_keys_that_are_not_read_are_named(values, why):
    fields = Fields(values, Path("model"))
    with pytest.raises(ModelError, match=why):
        read_ropes(fields, RULE, DIMS, ContextLengths(TRAINED, None))


def test_kinds_of_layers_without_a_rotation_of_their_own_are_named():
    rule = Fields({}, Path("model")).resolve(RopeRule(local_theta=1e4))
    each = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    assert read_ropes(
        Fields({"rope_parameters": each}, Path("m")), rule, HeadDims(32, 32), ContextLengths(TRAINED, None)
    )
    for extra in ("chunked_attention", "factor"):
        fields = Fields({"rope_parameters": each | {extra: {}}}, Path("model"))
        with pytest.raises(ModelError, match=f"{extra} = .* is not supported"):
            read_ropes(fields, rule, HeadDims(32, 32), ContextLengths(TRAINED, None))


@pytest.mark.parametrize("architecture", [name for name, family in FAMILIES.items() if family.rope is not None])
@pytest.mark.parametrize("key", ["no_such_key", "llama_4_scaling_beta", "alpha"])
def test_a_family_refuses_keys_that_it_does_not_read(architecture, key):
    rule = FAMILIES[architecture].rope
    if key in rule.keys:
        return
    rope = {"rope_type": "default", "rope_theta": 1e4, key: 2.0}
    kinds = ("full_attention", "sliding_attention") if rule.local_theta else ("",)
    for kind in kinds:
        given = {**{one: {"rope_theta": 1e4} for one in kinds}, kind: rope} if kind else rope
        fields = Fields({"rope_parameters": given}, Path("model"))
        with pytest.raises(ModelError, match=f"{key} = 2.0 is not supported"):
            read_ropes(fields, fields.resolve(rule), DIMS, ContextLengths(TRAINED, None))


def test_keys_without_effect_and_null_are_read():
    kept = {"finetuned": True, "mrope_section": [8, 4, 4], "alpha": None}
    assert ropes("yarn", **kept) == ropes("yarn")
