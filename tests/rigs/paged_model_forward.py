"""Runs a model with paged attention and recurrent states without a runner: chunks of several prompts in one step."""

import numpy as np
import torch

from quire.core.kv_groups import KVGroup
from quire.core.states import StateGroup
from quire.kernels import reference
from quire.kernels.contract import Batch
from quire.kernels.state_contract import StateBatch
from quire.layers.attend import PagedAttend
from quire.layers.context import AdapterRows, ForwardContext
from quire.layers.recur import BlockStates
from quire.models.description import describe
from quire.models.loading import load

NOWHERE = -1  # replaces blocks that no layer of a group attends to any more


def load_model(folder, dtype="float32", **options):
    """The decoder of a model folder."""
    return load(describe(folder, **options), dtype=dtype)


class Sequences:
    """Several sequences with scattered blocks, in one KV group per kind of layer; blocks behind a window are lost.

    Each has one live state block in a model with recurrences. `unsettled`: the last tokens of each chunk that are not
    applied to the state until the sequence's next chunk.
    """

    def __init__(self, description, model, lengths, *, block_size=16, kernels=reference, unsettled=0):
        self.model, self.kernels, self.block_size = model, kernels, block_size
        dtype = str(model.embed.dtype).removeprefix("torch.")
        kinds = list(dict.fromkeys(description.kv_layers))
        widths = [-(-length // block_size) for length in lengths]
        self.groups = [self._group(description, kind, dtype, sum(widths)) for kind in kinds]
        self.storages = [kernels.allocate(group, block_size, model.device) for group in self.groups]
        self.tables = []
        for index, storage in enumerate(self.storages):
            storage.data.fill_(torch.nan)
            ids = np.random.default_rng(index).permutation(sum(widths))
            table = np.full((len(lengths), max(widths)), NOWHERE)
            for row, width in enumerate(widths):
                table[row, :width] = ids[sum(widths[:row]) :][:width]
            self.tables.append(table)
        self.attend = PagedAttend(kernels, self.storages, model.score_scaling)
        self.recur, self.unsettled = None, unsettled
        if states := description.state_layers:
            kind = states[0]
            sizes = (len(lengths) + 1, unsettled, 4 * len(states) * kind.numbers(unsettled))
            self.states = kernels.allocate_states(StateGroup(len(states), kind, "float32", *sizes), model.device)
            self.states.data.fill_(torch.nan)
            self.recur = BlockStates(kernels, self.states)
            self.settled = np.zeros(len(lengths), np.int64)
        self.slots, self.width = None, 0  # the adapter of each sequence, and the width of all of them

    @staticmethod
    def _group(description, kind, dtype, num_blocks):
        layers = tuple(index for index, layer in enumerate(description.kv_layers) if layer == kind)
        return KVGroup(layers, kind, dtype, num_blocks, 1)

    @torch.inference_mode()
    def logits(self, chunks):
        """chunks: (sequence, start, token ids). Returns logits at all of their positions, concatenated, float32."""
        return self.model.logits(self.hidden(chunks), self.context).float()

    @torch.inference_mode()
    def hidden(self, chunks):
        """The hidden states at these positions."""
        rows, starts, tokens = zip(*chunks, strict=True)
        starts = np.array(starts)
        stops = starts + [len(ids) for ids in tokens]
        batches = []
        for group, table in zip(self.groups, self.tables, strict=True):
            first = np.maximum(starts - group.kind.span + 1, 0) // self.block_size if group.kind.span else 0 * starts
            lost = np.arange(table.shape[1]) < first[:, None]
            batches.append(Batch(starts, stops, np.where(lost, NOWHERE, table[list(rows)])))
        self.attend.plan(batches)
        if self.recur is not None:
            self._plan_states(np.array(rows), starts, stops)
        positions = torch.cat([torch.arange(a, b) for a, b in zip(starts, stops, strict=True)])
        ids = torch.tensor([token for some in tokens for token in some])
        adapters = None
        if self.slots is not None:
            slots = np.repeat([self.slots[row] for row in rows], [len(some) for some in tokens])
            adapters = AdapterRows(torch.from_numpy(slots.astype(np.int32)), self.width)
        self.context = ForwardContext(self.kernels, self.attend, positions, adapters, self.recur)
        return self.model(ids, self.context)

    def _plan_states(self, rows, starts, stops):
        settles = np.maximum(starts, stops - self.unsettled)
        blocks = len(self.settled) - rows  # not in the order of rows
        settled = np.minimum(self.settled[rows], starts)
        self.recur.plan(StateBatch(starts, stops, blocks, settled, settles, np.zeros((0, 3), np.int64)))
        self.settled[rows] = settles


def logits_of(folder, prompt, *, cut=10**9, dtype="float32", kernels=reference, **options):
    """Logits at every position of a prompt, computed in chunks of at most `cut` tokens."""
    description = describe(folder, **options)
    model = load(description, dtype=dtype)
    sequences = Sequences(description, model, [len(prompt)], block_size=8, kernels=kernels)
    parts = [(start, prompt[start : start + cut]) for start in range(0, len(prompt), cut)]
    return torch.cat([sequences.logits([(0, start, tokens)]) for start, tokens in parts])


def generate(folder, prompts, num_tokens, *, cut, dtype="float32", **options):
    """Greedy tokens of all prompts, in steps that mix prefill in chunks of `cut` tokens with decoding."""
    description = describe(folder, **options)
    model = load(description, dtype=dtype)
    sequences = Sequences(description, model, [len(prompt) + num_tokens for prompt in prompts])
    known, done = [list(prompt) for prompt in prompts], [0] * len(prompts)
    targets = [len(prompt) + num_tokens for prompt in prompts]
    while unfinished := [row for row, target in enumerate(targets) if len(known[row]) < target]:
        chunks = [(row, done[row], known[row][done[row] : done[row] + cut]) for row in unfinished]
        logits = sequences.logits(chunks).split([len(tokens) for _, _, tokens in chunks])
        for (row, start, tokens), found in zip(chunks, logits, strict=True):
            done[row] = start + len(tokens)
            if done[row] == len(known[row]):
                known[row].append(int(found[-1].argmax()))
    return [tokens[len(prompt) :] for tokens, prompt in zip(known, prompts, strict=True)]
