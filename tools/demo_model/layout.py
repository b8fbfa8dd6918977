"""Networks as folders in Hugging Face layout: write, read, and verify against transformers."""

import json
from dataclasses import asdict, fields
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.demo_model import world
from tools.demo_model.chats import END_OF_TURN, Chat, segments
from tools.demo_model.network import Network, Shape
from tools.demo_model.tokens import END_OF_TEXT, tokenizer_config

TOLERANCE = 1e-4  # of logits in float32, where the same weights are summed in another order
PREFIX = "model."


def write(folder: Path, network: Network, tokenizer: Tokenizer) -> None:
    """Write weights in bfloat16, configuration, tokenizer and chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    ends: dict[str, object] = {
        "eos_token_id": [tokenizer.token_to_id(END_OF_TURN), tokenizer.token_to_id(END_OF_TEXT)],
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
    }
    weights = {
        PREFIX + name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in network.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(tokenizer, network.shape.max_position_embeddings))
    _write_json(folder / "config.json", config(network.shape) | ends)
    sampling: dict[str, object] = {"do_sample": True, "temperature": 0.7, "top_p": 0.95, "max_new_tokens": 256}
    _write_json(folder / "generation_config.json", ends | sampling)


def config(shape: Shape) -> dict[str, object]:
    """The content of config.json without the ids of special tokens."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **asdict(shape),
        "hidden_act": "silu",
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": shape.num_hidden_layers,
        "torch_dtype": "bfloat16",
    }


def read(folder: Path) -> Network:
    """The network of a folder that `write` has written, in float32, with the shipped (bfloat16) values."""
    kept = json.loads((folder / "config.json").read_text())
    network = Network(Shape(**{field.name: kept[field.name] for field in fields(Shape)}))
    weights = load_file(folder / "model.safetensors")
    network.load_state_dict({name.removeprefix(PREFIX): value.float() for name, value in weights.items()})
    return network


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder that `write` has written."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def verify(folder: Path, chats: list[Chat]) -> None:
    """Compare chat rendering, token ids and logits with transformers. Raises ValueError if they differ."""
    ours, tokenizer = read(folder), read_tokenizer(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    their_tokenizer = AutoTokenizer.from_pretrained(folder)
    for chat in chats:
        text = "".join(segment.text for segment in segments(chat))
        rendered = their_tokenizer.apply_chat_template(chat.messages, tools=chat.tools, tokenize=False)
        if rendered != text:
            raise ValueError(f"transformers renders {rendered!r}, training read {text!r}")
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if their_tokenizer(text)["input_ids"] != ids:
            raise ValueError(f"transformers has other token ids for {text!r}")
        batch = torch.tensor([ids[: world.BUDGET]])
        with torch.no_grad():
            difference = (theirs(batch).logits - ours(batch)).abs().max().item()
        if difference > TOLERANCE:
            raise ValueError(f"logits differ by {difference} from those of transformers for {text!r}")


def _write_json(file: Path, content: dict[str, object]) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n")
