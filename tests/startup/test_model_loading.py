"""What `open_model` says about the model that it opens."""

from pathlib import Path
from shutil import copy

import multimodal_checkpoints as multimodal

from quire.startup.model_loading import open_model

EMBEDDED = Path(__file__).parents[2] / "quire" / "assets" / "demo_model"


def test_the_parts_of_a_multimodal_checkpoint_that_are_not_read_are_named(tmp_path):
    multimodal.publish(multimodal.make("smolvlm"), tmp_path)
    copy(EMBEDDED / "tokenizer.json", tmp_path)
    opened = open_model(tmp_path, "quire", max_model_len=None)
    assert opened.implementation == (
        "quire's own decoder, text only; 22 tensors of other parts are not read: model.connector, model.vision_model"
    )
