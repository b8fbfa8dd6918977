"""What `open_model` says about the model that it opens."""

from pathlib import Path
from shutil import copy, copytree

import multimodal_checkpoints as multimodal
import torch
from safetensors.torch import load_file, save_file

from quire.startup.model_loading import open_model

EMBEDDED = Path(__file__).parents[2] / "quire" / "assets" / "demo_model"


def test_the_parts_of_a_multimodal_checkpoint_that_are_not_read_are_named(tmp_path):
    multimodal.publish(multimodal.make("smolvlm"), tmp_path)
    copy(EMBEDDED / "tokenizer.json", tmp_path)
    opened = open_model(tmp_path, "quire", max_model_len=None)
    assert opened.implementation == (
        "quire's own decoder, text only; 22 tensors of other parts are not read: model.connector, model.vision_model"
    )


def test_layers_for_drafts_that_are_not_read_are_named(saved, tmp_path):
    folder = Path(copytree(saved("qwen3-5-tied")[0], tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    drafts = {"mtp.fc.weight": torch.zeros(64, 128), "mtp.norm.weight": torch.zeros(64)}
    save_file(tensors | drafts, folder / "model.safetensors")
    copy(EMBEDDED / "tokenizer.json", folder)
    opened = open_model(folder, "quire", max_model_len=None)
    assert opened.implementation == "quire's own decoder; 2 tensors of layers for drafts are not read"
