"""The file of the published model, the same model with expanded weights, and its chats as token ids."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from quire.config import EngineOptions
from quire.hub.locate import locate
from quire.startup.build import prepare
from quire.tokenizer.gguf import read_gguf_tokenizer
from quire.tokenizer.tokenizer import Tokenizer
from quire.weights.gguf.checkpoint import GgufCheckpoint

_PLENTY = 2 * 2**30  # bytes


def model_file() -> Path:
    """The .gguf file: that of the variable QUIRE_SMOLLM2, or else of `quire pull smollm2`. Raises ModelError."""
    name = os.environ.get("QUIRE_SMOLLM2", "smollm2")
    return locate(name, offline=True, report=lambda line: None, progress=lambda done, total: None)


def write_expanded(file: Path, folder: Path) -> Path:
    """Write the model of a .gguf file as a Hugging Face checkpoint in bfloat16. Returns its folder.

    `quantization="fp8"` is for checkpoints whose weights have no low bits.
    """
    checkpoint, tokenizer = GgufCheckpoint(file), read_gguf_tokenizer(file)
    weights = {name: tensor.bfloat16() for name, tensor in checkpoint.read(checkpoint.tensors)}
    save_file(weights, folder / "model.safetensors")
    texts = {**tokenizer.special_tokens, "chat_template": tokenizer.chat_templates["default"]}
    tokenizer._core.save(str(folder / "tokenizer.json"))
    for name, fields in (
        ("config.json", checkpoint.config),
        ("generation_config.json", checkpoint.generation_config),
        ("tokenizer_config.json", texts),
    ):
        (folder / name).write_text(json.dumps(dict(fields)))
    return folder


def memory_of_pool(num_tokens: int, options: dict[str, Any]) -> str:
    """The option `memory` with which the engine with these options gets a KV pool of `num_tokens` tokens."""
    asked = EngineOptions(**options, memory=f"{_PLENTY}")
    cache = prepare(asked, report=lambda line: None, progress=lambda done, total: None).cache
    spare = cache.groups[0].num_blocks - -(-num_tokens // cache.block_size)
    return f"{_PLENTY - spare * sum(group.bytes_per_block for group in cache.groups)}"


def chat_ids(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]]) -> list[int]:
    """Token ids of a conversation, ready for an answer."""
    text = tokenizer.apply_chat_template(list(messages), None, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)
