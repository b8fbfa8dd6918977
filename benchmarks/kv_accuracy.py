"""Perplexity of texts with keys and values in fp8, int8 and int4, beside those in the type of the model.

    python -m benchmarks.kv_accuracy MODEL TEXT [TEXT ...] [--dtype float32] [--tokens 2000] [--kernels auto]
        [--json FILE]

MODEL is a folder or a .gguf file. Its weights are expanded, so that nothing but keys and values is rounded; keys of
int8 and int4 are multiplied with queries in 8 bits. The text is computed at once. KL divergence is that of the
probabilities of the next token, and its error is the standard error over tokens.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu import machine
from benchmarks.logits import TextModel, divergences, perplexity
from benchmarks.result_file import write_result
from quire.config import EngineOptions, KVDType
from quire.startup.build import Prepared, prepare
from quire.tokenizer.gguf import read_gguf_tokenizer
from quire.tokenizer.tokenizer import Tokenizer

KINDS: tuple[KVDType, ...] = ("auto", "fp8", "int8", "int4")


def prepared_for(model: Path, dtype: str, kind: KVDType, kernels: str) -> Prepared:
    """The parts of an engine that serves `model` with this type of keys and values."""
    fields: dict[str, Any] = {"dtype": dtype, "kv_cache_dtype": kind, "kernels": kernels}
    options = EngineOptions(model=str(model), quantization="none", memory="2GiB", speculation="off", **fields)
    return prepare(options, report=lambda line: None, progress=lambda done, total: None)


def measure(model: Path, texts: list[Path], dtype: str, tokens: int, kernels: str) -> list[dict[str, Any]]:
    """A row of figures for each text and type."""
    tokenizer = read_gguf_tokenizer(model) if model.suffix == ".gguf" else Tokenizer.from_folder(model)
    prepared = {kind: prepared_for(model, dtype, kind, kernels) for kind in KINDS}
    loaded = {kind: TextModel(one) for kind, one in prepared.items()}
    rows = []
    for text in texts:
        ids = tokenizer.encode(text.read_text(encoding="utf-8"))[:tokens]
        exact = loaded["auto"].log_probabilities(ids, 1, torch.float32)
        exact_perplexity = perplexity(exact, ids[1:])
        for kind in KINDS:
            found = exact if kind == "auto" else loaded[kind].log_probabilities(ids, 1, torch.float32)
            divergence = divergences(exact, found)
            cache = prepared[kind].cache
            rows.append(
                {
                    "kv": kind,
                    "text": text.name,
                    "tokens": len(ids),
                    "bytes_per_token": sum(group.bytes_per_block for group in cache.groups) // cache.block_size,
                    "perplexity": perplexity(found, ids[1:]),
                    "ratio": perplexity(found, ids[1:]) / exact_perplexity,
                    "kl": divergence.mean().item(),
                    "kl_error": divergence.std().item() / len(divergence) ** 0.5,
                }
            )
    return rows


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kv_accuracy", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path, nargs="+", metavar="text")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=2000, help="of each text, from its beginning")
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    rows = measure(args.model, args.texts, args.dtype, args.tokens, args.kernels)
    print("| KV | B/token | text | tokens | perplexity | ratio | KL |")
    print("|---|---:|---|---:|---:|---:|---:|")
    for row in rows:
        print(
            f"| {row['kv']} | {row['bytes_per_token']} | {row['text']} | {row['tokens']} | {row['perplexity']:.3f} |"
            f" {row['ratio']:.4f} | {row['kl']:.5f} ± {row['kl_error']:.5f} |"
        )
    if args.json is not None:
        kept = {"machine": machine.describe(), "model": args.model.name, "dtype": args.dtype}
        write_result(args.json, {**kept, "types": rows})


if __name__ == "__main__":
    main()
