"""Adapters of all products of a layer, in every family without experts, against PEFT in float32."""

import pytest
import random_checkpoints as checkpoints
from model_equality import SERVED
from peft_adapters import assert_adapted_alike, save_adapter

from quire.models.description import FAMILIES

DENSE = [kind for kind in checkpoints.EVERY if FAMILIES[checkpoints.architecture(kind)].config.experts is None]


@pytest.mark.parametrize("kind", DENSE)
def test_logits_equal_peft(saved, tmp_path, kind):
    folder, theirs = saved(kind)
    adapted = save_adapter(tmp_path, theirs)
    assert_adapted_alike(folder, adapted, tmp_path, max_model_len=SERVED.get(kind))
