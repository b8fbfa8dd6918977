"""docs/models.md lists the fields that quire reads, those without effect and those that it refuses."""

import checkpoint_fields_table as fields_table

from quire.models import config_reader
from quire.models.config_fields import names_read
from quire.models.config_reader import OTHER_FAMILIES, UNSUPPORTED
from quire.models.description import FAMILIES
from quire.models.rope_config import ROPE_TYPES, WITHOUT_EFFECT
from quire.weights.settings import FIELDS


def test_the_tables_are_current():
    assert fields_table.PART.is_current(), "run python tests/rigs/checkpoint_fields_table.py"


def test_every_field_is_in_them():
    text = fields_table.text()
    names = {
        *UNSUPPORTED,
        *OTHER_FAMILIES,
        *ROPE_TYPES,
        *WITHOUT_EFFECT,
        *config_reader.WITHOUT_EFFECT,
        *(key for one in FIELDS.values() for key in one),
    }
    names = names.union(*(names_read(family) for family in FAMILIES.values()))
    assert not [name for name in names if f"`{name}`" not in text]


def test_every_layout_has_a_table():
    assert {*fields_table.LAYOUTS, "modelopt_fp4"} == FIELDS.keys()
    assert FIELDS["modelopt_fp4"] == FIELDS["modelopt"]
