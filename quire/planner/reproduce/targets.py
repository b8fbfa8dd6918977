"""The table of rows: what the sources report. Document numbers are those of docs/log.md."""

# ruff: noqa: E501  (a table)

from typing import NamedTuple


class Target(NamedTuple):
    """One row of the table."""

    id: str
    experiment: str
    reported: str
    source: str


TARGETS = (
    Target("M1", "share of reserved KV memory that holds live tokens, ShareGPT-like trace: Orca (Max), (Pow2), (Oracle), paged", "20.4, 26.8, 38.2, 96.3 %", "004 fig. 2"),
    Target("M2", "the three wastes of each allocator", "001: 32 live, 45 internal, 13 external, 10 reservation", "004, 001, 002"),
    Target("M3", "tail waste of paged allocation, block size 16", "< 4 %", "000, 002"),
    Target("M4", "KV bytes per token: Llama-2-70B, GQA-8, fp16", "327 680 B", "001"),
    Target("M5", "KV bytes per token: OPT-13B, fp16", "about 800 KB; 1.6 GB at 2048 tokens", "004"),
    Target("M6", "80 layers, head_dim 128, fp16, 4K context: MHA-64, GQA-8, MQA-1", "10.00, 1.25, 0.16 GiB", "002"),
    Target("M7", "four live requests of 600, 1250, 4000, 128 tokens, 8192 reserved each, 320 KiB per token", "10.00 GiB reserved, 1.82 GiB live, 81.8 % unused", "002"),
    Target("M8", "memory budget, Llama-70B on 80 GB: blocks, tokens, requests of 500 tokens", "8 400, 134 400, 268 against 65 contiguous (4.1x)", "001"),
    Target("M9", "two tensor-parallel ranks, 8K context, 8 GiB of KV per rank", "1.30 GiB per request and rank, 6 requests", "002"),
    Target("M10", "parallel sampling n=6, Alpaca-like: memory saved by sharing the prompt", "6.1-9.8 %", "004"),
    Target("M11", "beam search k=6, Alpaca-like: memory saved by copy-on-write", "37.6-55.2 %", "004"),
    Target("M12", "100 requests that share a prefix of 1000 tokens: prefix blocks saved", "99.0 %, 63 blocks a copy", "002"),
    Target("M13", "savings of a prefix cache: formula and table", "70, 80, 40, 20, 0 %", "001"),
    Target("M14", "life of a request: prompt of 45, ends at 112 tokens, block size 16", "3 blocks, then 7; 94.5 % saved against 2048", "001"),
    Target("M15", "Llama-2-7B fp16, 1000 tokens: KV, requests in 24 GB, ideal and with 75 % waste", "524 MB; 48; 12", "000"),
    Target("M16", "utilization of contiguous allocation: chat, code, summarization, translation", "28, 32, 38, 30 %", "001"),
    Target("M17", "copy-on-write beams 4, 8, 16: memory without and with", "32.4 to 12.8, 64.8 to 18.2, 129.6 to 28.4 GB", "001"),
    Target("M18", "allocated and used KV memory against concurrent requests", "gap below 3 % when paged; 98 against 31 % contiguous", "001"),
    Target("M19", "KV of three architectures, fp16, heads of 128, by context", "0.5, 1.25, 18 GiB at 4K; 4, 10, 144 at 32K; 40 at 128K", "002"),
    Target("M20", "block-size table: 64 requests of 512 tokens on average, Llama-70B", "40 to 640 MB empty, 32 to 2 KB of tables, attention 18 to 2 % slower; tables of 128 MB", "001"),
    Target("T1", "sustainable rate, ShareGPT-like, OPT-13B on A100-40GB: paged over Orca (Oracle), over Orca (Max), over static", "1.7-2.7x, 2.7-8x, up to 22x", "000, 004 fig. 12a"),
    Target("T2", "running batch: paged against the Orca variants", "30.4 against 7.0-13.6", "004 fig. 13a"),
    Target("T3", "sampling in parallel, width 6, and alone: over Orca (Oracle)", "2.3x, 1.3x", "004"),
    Target("T4", "shared prefix of 341 tokens, over Orca (Oracle)", "3.58x", "004"),
    Target("T5", "paged against contiguous attention kernel", "4-15 % slower (001), 20-26 % (004)", "001, 004"),
    Target("T6", "block-size sweep", "best 16-128 on ShareGPT, 16-32 on Alpaca", "001, 002, 004"),
    Target("T7", "preemption: swap against recompute, by length", "swap wins throughout for 70B over PCIe 4", "000, 001, 004"),
    Target("T8", "where paging does not pay", "-5 to 10 %", "001, 004"),
    Target("T9", "prefix cache on top of paging, system prompt of 500 tokens, batch 1 to 128", "1.0x through 32, 1.28x at 128", "001"),
    Target("T10", "Llama-70B on 80 GB: tokens/s by batch, contiguous, paged, with prefix cache", "1 247 peak, 6 380, 8 150", "001"),
    Target("T11", "OPT-175B on eight A100, Alpaca-like: where memory is plentiful", "the curves converge", "004 fig. 12f"),
    Target("R1", "radix cache against no cache: few-shot, agents, GSM8K, long context", "4.4, 5.6, 4.5, 1.2-2.9x", "000"),
    Target("R2", "longest-prefix-first order: share of the optimal hit rate", "about 96 %", "003"),
    Target("R3", "cache-aware router over 8 workers: hit rate, throughput", "20 to 75 %, 1.9x", "003"),
    Target("R4", "unique prompts: cost of the radix tree", "below 1 %", "000, 003"),
    Target("R5", "token-granular match: reused of 17 shared tokens", "17 against 16", "003"),
    Target("R6", "radix tree over nine time steps", "picture", "000 (Zheng fig. 6)"),
    Target("R7", "ablation: each feature off in turn", "direction", "000"),
    Target("C1", "jump-forward against one token at a time", "\"meaningful\"", "000"),
    Target("S1", "speculative decoding", "up to 3x", "000"),
    Target("S2", "split-KV attention on long sequences", "3x", "000"),
    Target("D1", "disaggregated prefill: first token of a 50-token prompt beside one of 2000", "bounded by its own prefill", "000"),
    Target("Q1", "FP8 KV cache: tokens that fit", "about 2x", "000"),
    Target("O1", "continuous over static batching, skewed output lengths", "direction and size", "002"),
    Target("P1", "KV budget of 8 GPUs x 80 GB, Llama-70B: users at 8K, at 128K", "about 200, about 12", "003"),
)  # fmt: skip
