"""Types of weights and of KV: perplexity, KL divergence to exact weights, bytes, and speed in turns.

A case is WEIGHTS:KV. `float32` and `bfloat16` are the file's weights expanded, `stored` those that the file has
(Q4_1), and the others roundings of expanded weights at load. The first case is exact: KL divergence is from it. With
@SIZE behind it, products round x with a scale for each SIZE columns instead of those of `Scheme.x_group_size`.
"""

import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.progress import track

from benchmarks.logits import TextModel, divergences, perplexity
from benchmarks.real.model import model_file, write_expanded
from benchmarks.real.texts import gpl, python_reference
from benchmarks.speculation import Bench
from quire.config import EngineOptions
from quire.kernels.contract import Scheme
from quire.startup.build import Prepared, prepare
from quire.tokenizer.gguf import read_gguf_tokenizer

EXACT = "float32:auto"
CASES = (
    *(EXACT, "bfloat16:auto", "stored:auto", "int8:auto", "fp8:auto", "int4:auto", "mxfp4:auto", "nvfp4:auto"),
    *("stored:int8", "stored:fp8", "stored:int4"),
)
X_GROUPS = (EXACT, "int8:auto", "int8:auto@32", "int8:auto@128", "int8:auto@65536")  # the last: a whole row
_ROUNDED = ("int8", "fp8", "int4", "mxfp4", "nvfp4")
WINDOW = 2048  # tokens of each text and of the prompt
_DECODED = 48  # tokens of one sequence
_BATCH = 8
_CONSOLE = Console(stderr=True)


def schemes(cases: tuple[str, ...] = CASES, window: int = WINDOW, rounds: int = 3) -> list[dict[str, Any]]:
    """A row for each case. cases: the exact one first. window: tokens of each text. rounds: of speed; 0 for none."""
    ids = text_ids(window)
    with tempfile.TemporaryDirectory() as temporary:
        expanded = Path(temporary)
        if any(case.startswith("fp8:") for case in cases):
            write_expanded(model_file(), expanded)
        options = {case: options_of(case, expanded) for case in cases}
        rows = _exactness(options, ids)
        if rounds:
            _add_speed(rows, options, ids["GPL-3"], rounds)
    return rows


def text_ids(window: int) -> dict[str, list[int]]:
    """The first `window` token ids of each text, by its name."""
    texts = {"GPL-3": gpl(), "Python's reference": python_reference()}
    tokenizer = read_gguf_tokenizer(model_file())
    return {name: tokenizer.encode(text[: 16 * window])[:window] for name, text in texts.items()}


def options_of(case: str, expanded: Path) -> dict[str, Any]:
    """Engine options of a case. expanded: folder of the checkpoint with expanded weights, for fp8."""
    weights, _, kv = case.partition("@")[0].partition(":")
    options: dict[str, Any] = {"model": str(expanded if weights == "fp8" else model_file()), "kv_cache_dtype": kv}
    if weights in ("float32", "bfloat16"):
        options |= {"dtype": weights, "quantization": "none"}
    elif weights in _ROUNDED:
        options |= {"quantization": weights}
    return options | {"memory": "2GiB", "max_model_len": 4096, "max_num_seqs": 16}


def _x_groups(case: str) -> AbstractContextManager[object]:
    """Context manager: products round x in the groups of a case."""
    size = case.partition("@")[2]
    return patch.object(Scheme, "x_group_size", int(size)) if size else nullcontext()


def _exactness(options: dict[str, dict[str, Any]], ids: dict[str, list[int]]) -> list[dict[str, Any]]:
    """Bytes, perplexity and KL divergence."""
    rows: list[dict[str, Any]] = []
    exact: dict[str, torch.Tensor] = {}
    exact_perplexity: dict[str, float] = {}
    for case, given in track(options.items(), "perplexity", console=_CONSOLE, transient=True):
        prepared = prepare(EngineOptions(**given), report=lambda line: None, progress=lambda done, total: None)
        model = TextModel(prepared)
        row = {"case": case, **_bytes(prepared)}
        for name, some in ids.items():
            with _x_groups(case):
                found = model.log_probabilities(some, 1, torch.float32)
            own = perplexity(found, some[1:])
            row[f"{name}: perplexity"] = round(own, 4)
            row[f"{name}: over exact"] = round(own / exact_perplexity.setdefault(name, own), 5)
            row[f"{name}: KL"] = round(divergences(exact.setdefault(name, found), found).mean().item(), 6)
        rows.append(row)
    return rows


def _bytes(prepared: Prepared) -> dict[str, Any]:
    return {
        "kernels": prepared.kernels.kernels.NAME,
        "weights MB": round(prepared.files.description.weight_bytes(prepared.dtype, prepared.schemes) / 1e6, 1),
        "KV B/token": sum(group.bytes_per_block for group in prepared.cache.groups) // prepared.cache.block_size,
    }


def _add_speed(rows: list[dict[str, Any]], options: dict[str, dict[str, Any]], ids: list[int], rounds: int) -> None:
    """Tokens per second of decoding and of a prompt, and their ratios to the stored weights in the same round."""
    benches = {case: Bench(**given) for case, given in options.items()}
    found: dict[str, list[dict[str, float]]] = {case: [] for case in options}
    for turn in track(range(rounds + 1), "speed", console=_CONSOLE, transient=True):  # the first captures steps
        for case in reversed(benches) if turn % 2 else benches:
            with _x_groups(case):
                found[case].append(_speed(benches[case], ids, turn))
    for bench in benches.values():
        bench.llm.close()
    base = "stored:auto" if "stored:auto" in found else next(case for case in found if case != EXACT)
    for row in rows:
        own, others = found[row["case"]][1:], found[base][1:]
        for what in own[0]:
            row[what] = round(median(one[what] for one in own), 1)
            ratios = [one[what] / other[what] for one, other in zip(own, others, strict=True)]
            row[f"{what}, over {base}"] = round(median(ratios), 3)


def _speed(bench: Bench, ids: list[int], turn: int) -> dict[str, float]:
    """Tokens per second. A prompt is computed in a run of its own before its decoding is measured."""
    greedy: dict[str, object] = {"temperature": 0, "ignore_eos": True}
    figures = {}
    for batch in (1, _BATCH):
        prompts = [ids[50 * turn + 7 * i : 50 * turn + 7 * i + 64] for i in range(batch)]
        bench.run(prompts, speculation=False, max_tokens=1, **greedy)
        run = bench.run(prompts, speculation=False, max_tokens=_DECODED, **greedy)
        figures[f"decode {batch} tok/s"] = run.num_tokens / run.seconds
    prompt = ids[turn + 1 :] + ids[: turn + 1]  # no match with an earlier one
    figures["prompt tok/s"] = len(prompt) / bench.run([prompt], speculation=False, max_tokens=1, **greedy).seconds
    return figures
