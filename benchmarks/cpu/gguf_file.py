"""Conversion of a checkpoint to one GGUF file, for engines that read no other format.

Sizes are right. The rows of Llama's query and key projections keep their order, which a converter would change; this
does not matter for random weights.
"""

import json
from pathlib import Path
from typing import Any

import gguf
from safetensors import safe_open
from torch import Tensor

_ARCHITECTURES = {"LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA, "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2}
_TYPES = {
    "BF16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "F16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "Q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "Q4_0": (gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}


def gguf_file(folder: Path, kind: str = "BF16") -> Path:
    """The GGUF file beside a checkpoint's folder. Creates it unless it exists.

    kind: type of matrices: BF16, F16, Q8_0 or Q4_0. With Q4_0 the head, and the embedding table, which may be the head,
    have the type Q8_0.
    """
    path = folder.with_name(f"{folder.name}-{kind}.gguf")
    if path.exists():
        return path
    config = json.loads((folder / "config.json").read_text())
    architecture = _ARCHITECTURES[config["architectures"][0]]
    unfinished = path.with_suffix(".part")
    writer = gguf.GGUFWriter(unfinished, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_file_type(_TYPES[kind][1])
    _add_shape(writer, config)
    _add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()), config)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                new = names.get_name(name, try_suffixes=(".weight", ".bias"))
                assert new is not None, name
                _add_tensor(writer, new, tensors.get_tensor(name), _TYPES[kind][0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return unfinished.rename(path)


def _add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    words = {index: word for word, index in (tokenizer["model"]["vocab"] | added).items()}
    control = {token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([words[index] for index in range(config["vocab_size"])])
    writer.add_token_types(
        [gguf.TokenType.CONTROL if index in control else gguf.TokenType.NORMAL for index in range(config["vocab_size"])]
    )
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)  # noqa: FBT003 (gguf's interface)


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Tensor, kind: gguf.GGMLQuantizationType) -> None:
    if tensor.ndim < 2:
        kind = gguf.GGMLQuantizationType.F32
    elif kind == gguf.GGMLQuantizationType.Q4_0 and name.startswith(("token_embd", "output.")):
        kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor(name, gguf.quants.quantize(tensor.float().numpy(), kind), raw_dtype=kind)
