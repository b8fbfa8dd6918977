"""Drives a TorchRunner with hand-made Steps, without a scheduler."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from kv_groups import kv_group

from quire.config import CacheConfig
from quire.core.step import (
    ChunkOutput,
    Chunks,
    Move,
    NewRows,
    Pooling,
    SamplingMasks,
    Step,
    StepResult,
    TableUpdates,
    TokenListKind,
    TokenLists,
)
from quire.kernels import reference
from quire.kernels.contract import Kernels
from quire.kernels.deterministic import DETERMINISTIC as deterministic
from quire.models.decoder import Decoder
from quire.models.description import describe
from quire.models.loading import load
from quire.params import SamplingParams
from quire.runner.model_runner import TorchRunner

GREEDY = SamplingParams(temperature=0.0)


def load_model(folder: Path, dtype: str = "float32", kernels: Kernels = reference, device: str = "cpu") -> Decoder:
    return load(describe(folder), dtype=dtype, kernels=kernels, device=device)


def cache_for(model: Decoder, num_blocks: int, block_size: int = 4, num_groups: int = 1) -> CacheConfig:
    """A KV group without a window for each shape of heads. Its layers may be assigned in turn to several groups."""
    dtype = str(model.embed.dtype).removeprefix("torch.")
    by_shape = {}
    for layer in model.config.layers:
        if layer.kv_layer >= 0 and layer.mixer.has_own_kv:
            by_shape.setdefault((layer.mixer.num_kv_heads, layer.mixer.head_dim), []).append(layer.kv_layer)
    groups = [
        kv_group(tuple(layers[g::num_groups]), *shape, dtype, num_blocks, 1)
        for shape, layers in by_shape.items()
        for g in range(num_groups)
    ]
    return CacheConfig(block_size, tuple(groups))


class Driver:
    """A runner with the state of its rows that a scheduler has. Blocks are scattered and never freed."""

    def __init__(self, model, *, rows=8, max_model_len=256, num_blocks=600, block_size=4, num_groups=1, ticks=None,
                 kernels=reference, strict=deterministic, adapters=None):  # fmt: skip
        self.cache = cache_for(model, num_blocks, block_size, num_groups)
        self.adapters = adapters
        clock = {} if ticks is None else {"clock": iter(ticks).__next__}
        self.runner = TorchRunner(
            model,
            kernels,
            cache=self.cache,
            max_num_seqs=rows,
            max_model_len=max_model_len,
            deterministic_kernels=strict,
            adapters=adapters,
            **clock,
        )
        random = np.random.default_rng(0)
        self.free = [random.permutation(num_blocks).tolist() for _ in self.cache.groups]
        self.tables = {}  # row -> per group, block ids
        self.step_id = 0

    def step(self, chunks, *, opens=(), tokens=(), moves=(), blocks=None, reset=False, adapters=()) -> Step:
        """chunks: (row, start, stop) that sample, or full Chunk tuples. opens: (row, SamplingParams or RowParams).

        adapters: (slot, digest).
        """
        chunks = [c if len(c) == 7 else (c[0], c[0], c[1], c[2], 0, 1, int(ChunkOutput.SAMPLE)) for c in chunks]
        self.step_id += 1
        if blocks is None:
            blocks = [TableUpdates.of(spans) for spans in self._grow(chunks, [row for row, _ in opens])]
        return Step(
            self.step_id,
            reset,
            open_rows(opens),
            TableUpdates.of(list(tokens)),
            blocks,
            list(moves),
            Chunks.of(chunks),
            list(adapters),
        )

    def _grow(self, chunks, opened):
        spans = [[] for _ in self.free]
        for row in opened:
            self.tables[row] = [[] for _ in self.free]
        for row, _, _, stop, *_ in chunks:
            for group, table in enumerate(self.tables[row]):
                new = -(-stop // self.cache.block_size) - len(table)
                if new > 0:
                    ids = [self.free[group].pop() for _ in range(new)]
                    spans[group].append((row, len(table), ids))
                    table += ids
        return spans

    def run(self, chunks, *, late=None, **options) -> StepResult:
        step = self.step(chunks, **options)
        self.runner.launch(step)
        self.runner.sample(step.id, SamplingMasks.empty() if late is None else late)
        return self.runner.collect()

    def generate(self, prompts, num_tokens, params=GREEDY, *, cut=10**9, rows=None, adapters=()) -> list[list[int]]:
        """Prefill in chunks of `cut` tokens, then decode, with all prompts in one batch.

        adapters: of the first step.
        """
        rows = range(len(prompts)) if rows is None else rows
        params = params if isinstance(params, list) else [params] * len(prompts)
        done = dict.fromkeys(rows, 0)
        known = dict(zip(rows, prompts, strict=True))
        outputs = {row: [] for row in rows}
        options = {
            "opens": list(zip(rows, params, strict=True)),
            "tokens": [(row, 0, prompt) for row, prompt in known.items()],
            "adapters": adapters,
        }
        while any(len(output) < num_tokens for output in outputs.values()):
            chunks = []
            for row in rows:
                if len(outputs[row]) < num_tokens:
                    target = len(known[row]) + len(outputs[row])
                    stop = min(target, done[row] + cut)
                    samples = stop == target
                    chunks.append((row, row, done[row], stop, 0, int(samples), int(samples)))
                    done[row] = stop
            result = self.run(chunks, **options)
            options = {}
            sampled = [chunk[0] for chunk, count in zip(chunks, result.counts, strict=True) if count]
            for row, token in zip(sampled, result.tokens.tolist(), strict=True):
                outputs[row].append(token)
        return list(outputs.values())


class RowParams(NamedTuple):
    """Parameters of a row, with values that a front end and a scheduler would add."""

    params: SamplingParams
    prompt_len: int = 0
    eos: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    pooling: Pooling = Pooling.NONE
    slot: int = 0  # of an adapter
    adapter_start: int = 0


def open_rows(opens) -> NewRows:
    """Opens from (row, SamplingParams or RowParams). The sequence id is the row, and the sample index 0."""
    rows = [row for row, _ in opens]
    params_of_rows = [
        row_params if isinstance(row_params, RowParams) else RowParams(row_params) for _, row_params in opens
    ]
    params = [row_params.params for row_params in params_of_rows]

    def asked(name):
        return [-1 if getattr(p, name) is None else getattr(p, name) for p in params]

    return NewRows.of(
        rows=rows,
        seq_ids=rows,
        seeds=[p.seed or 0 for p in params],
        temperatures=[p.temperature for p in params],
        top_ps=[p.top_p for p in params],
        top_ks=[p.top_k for p in params],
        min_ps=[p.min_p for p in params],
        num_logprobs=asked("logprobs"),
        num_prompt_logprobs=asked("prompt_logprobs"),
        prompt_lens=[row_params.prompt_len for row_params in params_of_rows],
        min_lens=[row_params.prompt_len + row_params.params.min_tokens for row_params in params_of_rows],
        presence_penalties=[p.presence_penalty for p in params],
        frequency_penalties=[p.frequency_penalty for p in params],
        repetition_penalties=[p.repetition_penalty for p in params],
        deterministic=[p.deterministic for p in params],
        poolings=[row_params.pooling for row_params in params_of_rows],
        adapters=[row_params.slot for row_params in params_of_rows],
        adapter_starts=[row_params.adapter_start for row_params in params_of_rows],
        lists=TokenLists.of(
            [one for row, row_params in zip(rows, params_of_rows, strict=True) for one in _lists(row, row_params)]
        ),
    )


def _lists(row, row_params):
    params = row_params.params
    yield from ((row, TokenListKind.BAD_WORD, list(word)) for word in row_params.bad_words)
    if params.logit_bias:
        yield row, TokenListKind.BIAS, params.logit_bias
    if params.allowed_token_ids is not None:
        yield row, TokenListKind.ALLOWED, list(params.allowed_token_ids)
    if row_params.eos:
        yield row, TokenListKind.END, list(row_params.eos)
    if params.no_repeat_ngram_size:
        yield row, TokenListKind.NO_REPEAT, [params.no_repeat_ngram_size, *sorted(row_params.eos)]
    if params.logprob_token_ids:
        yield row, TokenListKind.LOGPROB, list(params.logprob_token_ids)


def copy_move(group, pairs, num_tokens) -> Move:
    return Move(1, group, "device", "device", pairs, num_tokens)
