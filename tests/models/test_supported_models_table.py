"""docs/models.md lists the tested families and variants."""

import random_checkpoints as checkpoints
import supported_models_table as model_table

from quire.models.description import FAMILIES
from quire.models.text_part import TEXT_MODELS


def test_the_table_is_current():
    assert model_table.PART.is_current(), "run python tests/rigs/supported_models_table.py"


def test_every_family_and_every_variant_is_in_it():
    table = model_table.table()
    assert set(model_table.MODELS) == set(FAMILIES)
    assert set(model_table.SEEING) == set(TEXT_MODELS)
    for kind in checkpoints.EVERY:
        assert f" {kind}," in table or f" {kind} |" in table
