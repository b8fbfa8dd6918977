"""Perplexity of texts with keys and values in 16, 8 and 4 bits, beside those in the type of the model.

    python -m benchmarks.kv_accuracy MODEL TEXT [TEXT ...] [--dtype float32] [--tokens 2000] [--kernels auto]
        [--json FILE]

MODEL is a folder or a .gguf file. Its weights are expanded, so that nothing but keys and values is rounded; keys of
int8 and int4 are multiplied with queries in 8 bits. The text is computed at once. KL divergence is that of the
probabilities of the next token, and its error is the standard error over tokens.
"""

import argparse
import json
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.commit import commit_of
from benchmarks.cpu import machine
from quire.config import EngineOptions, KVDType
from quire.kernels.contract import Batch
from quire.layers.attend import PagedAttend
from quire.models.model import Model
from quire.startup.build import Prepared, prepare
from quire.tokenizer.gguf import read_gguf_tokenizer
from quire.tokenizer.tokenizer import Tokenizer

KINDS: tuple[KVDType, ...] = ("auto", "fp8", "int8", "int4")


def prepared_for(model: Path, dtype: str, kind: KVDType, kernels: str) -> Prepared:
    """The parts of an engine that serves `model` with this type of keys and values."""
    fields: dict[str, Any] = {"dtype": dtype, "kv_cache_dtype": kind, "kernels": kernels}
    options = EngineOptions(model=str(model), quantization="none", memory="2GiB", speculation="off", **fields)
    return prepare(options, report=lambda line: None, progress=lambda done, total: None)


@torch.inference_mode()
def log_probabilities(prepared: Prepared, model: Model, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities (tokens - 1, vocab_size) of the tokens after the first of `ids`, an int64 (tokens,)."""
    kernels, block_size = prepared.kernels.kernels, prepared.cache.block_size
    storages = [kernels.allocate(group, block_size, torch.device("cpu")) for group in prepared.cache.groups]
    attend = PagedAttend(kernels, storages, model.score_scaling)
    table = np.arange(-(-len(ids) // block_size), dtype=np.int64)[None]
    attend.plan([Batch(np.zeros(1, np.int64), np.array([len(ids)]), table) for _ in storages])
    hidden = model.forward(ids, torch.arange(len(ids)), attend, kernels)
    return model.logits(hidden[:-1], kernels).float().log_softmax(-1)


def measure(model: Path, texts: list[Path], dtype: str, tokens: int, kernels: str) -> list[dict[str, Any]]:
    """A row of figures for each type and text."""
    tokenizer = read_gguf_tokenizer(model) if model.suffix == ".gguf" else Tokenizer.from_folder(model)
    first, loaded = prepared_for(model, dtype, "auto", kernels), None
    loaded = first.files.load(first.dtype, first.device, first.kernels.kernels, first.schemes, lambda done, total: None)
    rows = []
    for text in texts:
        ids = torch.tensor(tokenizer.encode(text.read_text(encoding="utf-8"))[:tokens])
        exact = torch.empty(0)
        for kind in KINDS:
            prepared = prepared_for(model, dtype, kind, kernels)
            found = log_probabilities(prepared, loaded, ids)
            exact = exact if len(exact) else found
            divergences = (exact.exp() * (exact - found)).sum(-1).double()
            size = sum(group.bytes_per_block for group in prepared.cache.groups)
            rows.append(
                {
                    "kv": kind,
                    "text": text.name,
                    "tokens": len(ids),
                    "bytes_per_token": size // prepared.cache.block_size,
                    "perplexity": exp(-found.gather(1, ids[1:, None]).double().mean().item()),
                    "kl": divergences.mean().item(),
                    "kl_error": divergences.std().item() / len(divergences) ** 0.5,
                }
            )
            rows[-1]["ratio"] = rows[-1]["perplexity"] / next(r for r in rows if r["text"] == text.name)["perplexity"]
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
        kept = {"commit": commit_of(), "machine": machine.describe(), "model": args.model.name, "dtype": args.dtype}
        args.json.write_text(json.dumps({**kept, "types": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
