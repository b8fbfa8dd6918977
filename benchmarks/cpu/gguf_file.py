"""Conversion of a checkpoint to one GGUF file, for engines that read no other format.

Sizes are right. The rows of Llama's query and key projections keep their order, which a converter would change; this
does not matter for random weights.
"""

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
from safetensors import safe_open
from torch import Tensor

_ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
}
_TYPES = {
    "BF16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "F16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "Q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "Q4_0": (gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}

_QUANTIZE = """
import ctypes, sys, llama_cpp
source, target, kind = sys.argv[1:]
params = llama_cpp.llama_model_quantize_default_params()
params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
sys.exit(llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)))
"""


def gguf_file(folder: Path, kind: str = "BF16", *, llama_cpp: str = "") -> Path:
    """The GGUF file beside a checkpoint's folder. Creates it unless it exists.

    kind: type of matrices: BF16, F16, Q8_0 or Q4_0. With Q4_0 the head, and the embedding table, which may be the head,
    have the type Q8_0. Other kinds, such as Q4_K_M, are mixtures of types: the interpreter `llama_cpp`, which has the
    package of this name, makes them from the file in BF16. Raises ValueError if they need it and it is not given.
    """
    path = folder.with_name(f"{folder.name}-{kind}.gguf")
    if path.exists():
        return path
    if kind not in _TYPES:
        if not llama_cpp:
            raise ValueError(f"{path} does not exist, and only llama_cpp can make it: pass --peer llama_cpp=PYTHON")
        unfinished = path.with_suffix(".part")
        words = [llama_cpp, "-c", _QUANTIZE, gguf_file(folder), unfinished, kind]
        subprocess.run(words, check=True, capture_output=True)
        return unfinished.rename(path)
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


def types(path: Path) -> str:
    """The types of the tensors of a GGUF file, in words: "412 MB Q8_0, 1 MB F32"."""
    sizes: Counter[str] = Counter()
    for tensor in gguf.GGUFReader(path).tensors:
        sizes[tensor.tensor_type.name] += tensor.n_bytes
    return ", ".join(f"{size / 1e6:.0f} MB {name}" for name, size in sizes.most_common())


def _add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
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
    end = config["eos_token_id"]
    if "bos_token_id" in config:
        writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(end[0] if isinstance(end, list) else end)
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)  # noqa: FBT003 (gguf's interface)


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Tensor, kind: gguf.GGMLQuantizationType) -> None:
    if tensor.ndim < 2:
        kind = gguf.GGMLQuantizationType.F32
    elif kind == gguf.GGMLQuantizationType.Q4_0 and name.startswith(("token_embd", "output.")):
        kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor(name, gguf.quants.quantize(tensor.float().numpy(), kind), raw_dtype=kind)
