"""quire beside transformers on one machine in one run: the same checkpoint, prompts and lengths, greedy.

    python -m benchmarks.offline [--shape 0.5b] [--workloads W1,W2,W4] [--repeat 3] [--dtype bfloat16] [--json FILE]

The checkpoint has random weights (Llama layout, made on the spot): speed depends on shapes alone.
transformers runs a static batch, left-padded, to the longest output; quire batches continuously. Runs
alternate between the two; medians and their ratio are printed. W3 (a shared prefix) waits for the
prefix cache.
"""

import argparse
import json
import platform
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.workloads import Workload, workload
from quire.config import EngineOptions
from quire.engine import embedded
from quire.engine.build import build
from quire.engine.engine import Engine
from quire.params import SamplingParams

SHAPES = {
    "0.5b": {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 4864,
        "vocab_size": 32000,
    },
    "tiny": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 768,
        "vocab_size": 32000,
    },
}


def make_checkpoint(folder: Path, shape: str) -> None:
    """A random checkpoint in Hugging Face layout, with the embedded model's tokenizer (never used)."""
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=4096, tie_word_embeddings=True)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded.folder() / name, folder)


def run_quire(engine: Engine, work: Workload, tag: str) -> float:
    """Seconds for all requests at once, to the last token."""
    start = time.perf_counter()
    for i, query in enumerate(work.queries):
        params = SamplingParams(temperature=0, max_tokens=query.num_output_tokens, ignore_eos=True)
        engine.add(f"{tag}-{i}", query.prompt, params)
    count = 0
    while engine.has_work:
        count += sum(len(output.token_ids) for output in engine.step())
    assert count == work.num_output_tokens
    return time.perf_counter() - start


def run_transformers(model: LlamaForCausalLM, work: Workload) -> float:
    """Seconds for one static batch: padded on the left, and running until the longest output is done."""
    longest = max(len(query.prompt) for query in work.queries)
    outputs = max(query.num_output_tokens for query in work.queries)
    padding = [longest - len(query.prompt) for query in work.queries]
    padded = [[0] * pad + query.prompt for pad, query in zip(padding, work.queries, strict=True)]
    mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
    start = time.perf_counter()
    model.generate(
        torch.tensor(padded),
        attention_mask=torch.tensor(mask),
        max_new_tokens=outputs,
        min_new_tokens=outputs,
        do_sample=False,
        pad_token_id=0,
    )
    return time.perf_counter() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--workloads", default="W1,W2,W4")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    figures: dict[str, object] = {"shape": args.shape, "dtype": args.dtype, "torch": torch.__version__}
    figures |= {"threads": torch.get_num_threads(), "machine": platform.machine()}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_checkpoint(folder, args.shape)
        options = EngineOptions(model=temporary, dtype=args.dtype, memory="6GiB", max_num_seqs=32, step_seconds=1e9)
        engine = build(options, report=print, progress=lambda done, total: None).engine
        peer = LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype)).eval()
    print(f"{'':<4}{'tokens':>14}{'quire tok/s':>14}{'transformers tok/s':>20}{'ratio':>8}")
    for name in args.workloads.split(","):
        ours, theirs = [], []
        for repeat in range(args.repeat + 1):  # the first round warms both up and is not counted
            work = workload(name, seed=repeat)
            ours.append(run_quire(engine, work, f"{name}-{repeat}"))
            theirs.append(run_transformers(peer, work))
        # a long prompt with one token of output measures prefill
        tokens = work.num_output_tokens if work.num_output_tokens > 1 else work.num_prompt_tokens
        mine, other = statistics.median(ours[1:]), statistics.median(theirs[1:])
        figures[name] = {"quire_seconds": ours[1:], "transformers_seconds": theirs[1:], "tokens": tokens}
        print(f"{name:<4}{tokens:>14}{tokens / mine:>14.1f}{tokens / other:>20.1f}{other / mine:>8.2f}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
