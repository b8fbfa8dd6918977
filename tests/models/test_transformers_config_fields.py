"""Every field of the configs of transformers is read, refused, or listed as without effect."""

from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path

import pytest
import transformers
from transformers import PreTrainedConfig

from quire.errors import ModelError
from quire.models.config_fields import names_read
from quire.models.config_reader import OTHER_FAMILIES, UNSUPPORTED, WITHOUT_EFFECT
from quire.models.description import FAMILIES, describe

# fields of every config, which say nothing about a decoder
OF_EVERY_CONFIG = {
    *("transformers_version", "architectures", "dtype", "is_encoder_decoder", "chunk_size_feed_forward"),
    *("output_hidden_states", "return_dict", "id2label", "label2id", "problem_type"),
}
REQUIRED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_topk": 1}  # where the class of transformers has none
# values that a field must not have, where UNSUPPORTED or OTHER_FAMILIES have the field
REFUSED = {
    "alibi": True,
    "add_cross_attention": True,
    "clip_qkv": 8.0,
    "q_lora_rank": 8,
    "layer_norm_elementwise_affine": False,
    "mamba_hidden_act": "gelu",
    "moe_apply_router_weight_on_input": True,
    "moe_norm_min": 0.1,
    "moe_router_logit_softcapping": 30.0,
    "use_bidirectional_attention": True,
}


class Recorded(dict):
    """The values of a config.json, which note the names that are read."""

    def __init__(self, values):
        super().__init__(values)
        self.read = set()

    def get(self, name, default=None):
        self.read.add(name)
        return super().get(name, default)


@dataclass
class NoWeights:
    """A checkpoint whose weights must not be read."""

    config: dict
    path: Path = Path("model")
    tensors: dict = field(default_factory=dict)
    generation_config: dict = field(default_factory=dict)
    quant_method: str | None = None


def config_class(architecture):
    return getattr(transformers, architecture).config_class


def defaults(architecture):
    """The config.json of a config class without arguments; required fields have a value."""
    cls = config_class(architecture)
    known = {one.name: one for one in fields(cls)}
    found = {name: one.default for name, one in known.items() if one.default is not MISSING}
    found = {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}  # as in JSON
    sizes = {name: value for name, value in REQUIRED.items() if name in known and found.get(name) is None}
    if rule := FAMILIES[architecture].recurrence:
        sizes["layer_types"] = [rule.attending[-1], *[rule.kinds[-1]] * (found.get("num_hidden_layers", 2) - 1)]
    base = {"architectures": [architecture], "model_type": cls.model_type, "dtype": "bfloat16", "head_dim": 128}
    return {**base, **{name: value for name, value in found.items() if value is not None}, **sizes}


def test_fields_of_every_config_are_known():
    assert {one.name for one in fields(PreTrainedConfig)} == OF_EVERY_CONFIG


@pytest.mark.parametrize("architecture", FAMILIES)
def test_no_field_is_ignored_in_silence(architecture):
    family = FAMILIES[architecture]
    config = Recorded(defaults(architecture))
    describe(NoWeights(config))
    checked = {*UNSUPPORTED, *(OTHER_FAMILIES.keys() - set(family.unused))} - names_read(family)
    read = names_read(family) | (config.read - checked)
    unknown = {one.name for one in fields(config_class(architecture))} - OF_EVERY_CONFIG - read
    for name in sorted(unknown - WITHOUT_EFFECT.keys() - set(family.unused)):
        assert name in REFUSED, f"{name} is not read; read it, refuse it, or list it in WITHOUT_EFFECT with the reason"
        with pytest.raises(ModelError, match=rf"{name} = .* is not supported"):
            describe(NoWeights({**defaults(architecture), name: REFUSED[name]}))


def test_tables_have_no_fields_that_are_read_or_do_not_exist():
    exist = {one.name for architecture in FAMILIES for one in fields(config_class(architecture))}
    assert WITHOUT_EFFECT.keys() <= exist
    assert REFUSED.keys() <= exist
    for family in FAMILIES.values():
        assert not names_read(family) & {*WITHOUT_EFFECT, *family.unused}
