"""A kind of KV that only this file knows, with one plane: scheduler, cache, memory plan, reference kernels and swaps.

Values are the first numbers of keys, as in latent attention.
"""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_oracle import naive
from kv_groups import kv_group

from quire.cache.kv_cache import KVCache
from quire.config import CacheConfig, EngineOptions, SchedulerConfig
from quire.core.kv_groups import KVGroup, KVKind
from quire.core.request import Beams, Request
from quire.cost.memory_plan import HostPoolPlan, PlanLine, plan_memory
from quire.cost.model_shape import ModelShape
from quire.engine.engine import Engine
from quire.errors import ConfigError, RequestError
from quire.kernels.choose import choose
from quire.kernels.contract import Batch, Requirements
from quire.kernels.deterministic import DETERMINISTIC
from quire.kernels.reference import REFERENCE
from quire.layers.attend import PagedAttend, ScoreScaling
from quire.layers.context import ForwardContext
from quire.params import SamplingParams
from quire.runner.model_runner import TorchRunner
from quire.scheduler.scheduler import Scheduler
from quire.startup.memory_demand import make_cache_config, memory_profile

HEADS, KEY, VALUE, LAYERS, WIDTH, VOCAB = 3, 12, 8, 2, 16, 40
SCALE = 0.3
BEAMS = Beams(width=2, num_candidates=4, length_penalty=1.0, early_stopping=False)


class SharedKV(KVKind, frozen=True, tag="shared"):
    """One head of keys, whose first VALUE numbers are the values. A prefix is shared in whole blocks."""

    name = "shared"

    @property
    def planes(self):
        return (self.head_dim,)

    @property
    def value_dim(self):
        return VALUE

    @property
    def shares_partial_blocks(self):
        return False


KIND = SharedKV(1, KEY)


class Toy:
    """A model of two layers of such attention, with residuals. `score` has its hidden states without a cache."""

    device = torch.device("cpu")
    vocab_size, class_head, batch_invariant = VOCAB, None, True
    score_scaling = (ScoreScaling(SCALE),) * LAYERS

    def __init__(self):
        draw = torch.Generator().manual_seed(3)
        self.embed = torch.randn(VOCAB, WIDTH, generator=draw)
        self.q = torch.randn(LAYERS, HEADS * KEY, WIDTH, generator=draw) / 2
        self.k = torch.randn(LAYERS, KEY, WIDTH, generator=draw) / 2
        self.o = torch.randn(LAYERS, WIDTH, HEADS * VALUE, generator=draw) / 2

    def forward(self, token_ids, context):
        x = self.embed[token_ids] + torch.sin(context.positions)[:, None]
        for layer in range(LAYERS):
            q = (x @ self.q[layer].T).view(-1, HEADS, KEY)
            k = (x @ self.k[layer].T).view(-1, 1, KEY)
            x = x + context.attend(layer, q, k, k[..., :VALUE]) @ self.o[layer].T
        return x

    def logits(self, hidden, context):
        return hidden @ self.embed.T

    def attend_densely(self, layer, q, k, v):
        found = naive(q.numpy(), k.numpy(), v.numpy(), 0, SCALE)
        return torch.from_numpy(found).float()

    def continued(self, prompt, num_tokens):
        """Greedy tokens, each from a pass over all tokens before it."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            context = ForwardContext(REFERENCE, self.attend_densely, torch.arange(len(tokens)))
            tokens.append(int(self.logits(self.forward(torch.tensor(tokens), context), context)[-1].argmax()))
        return tokens[len(prompt) :]


def cache_config(num_blocks, num_host_blocks=0, index="none", block_size=4):
    bytes_per_block = block_size * LAYERS * KIND.bytes_per_token(lambda numbers: 4 * numbers)
    group = KVGroup((0, 1), KIND, "float32", num_blocks, bytes_per_block, num_host_blocks)
    return CacheConfig(block_size, (group,), index)


@pytest.fixture(scope="module")
def model():
    return Toy()


@pytest.fixture(scope="module")
def prompts(model):
    draw = random.Random(1)
    shared = [draw.randrange(VOCAB) for _ in range(10)]
    found = [
        shared[: draw.randint(1, 10)] + [draw.randrange(VOCAB) for _ in range(draw.randint(1, 9))] for _ in range(8)
    ]
    return [(prompt, model.continued(prompt, 12)) for prompt in found]


@pytest.mark.parametrize(
    ("num_blocks", "num_host_blocks", "index", "preemption"),
    [
        (200, 0, "none", "recompute"),
        (12, 0, "none", "recompute"),
        (12, 60, "none", "swap"),
        (14, 0, "radix", "recompute"),
    ],
    ids=["ample", "recomputed", "swapped", "shared prefixes"],
)
def test_outputs_are_those_of_dense_attention(model, prompts, num_blocks, num_host_blocks, index, preemption):
    cache = cache_config(num_blocks, num_host_blocks, index)
    limits = SchedulerConfig(8, 16, 32, 0.5, 0.0, steps_in_flight=2, preemption=preemption)
    limited = {"max_num_seqs": 8, "max_model_len": 32}
    runner = TorchRunner(model, REFERENCE, cache=cache, **limited, deterministic_kernels=DETERMINISTIC)
    engine = Engine(scheduler := Scheduler(limits, KVCache(cache)), runner, vocab_size=VOCAB)
    for turn in range(2):
        for i, (prompt, _) in enumerate(prompts):
            params = SamplingParams(temperature=0.0, max_tokens=12, deterministic=i % 4 == 3)
            engine.add(Request(f"{turn} {i}", prompt, params))
        found = {}
        while engine.has_work:
            for output in engine.step():
                found.setdefault(output.request_id, []).extend(output.token_ids)
            assert scheduler.check() == []
        assert found == {f"{turn} {i}": expected for i, (_, expected) in enumerate(prompts)}
    stats = engine.stats()
    assert stats.failed_steps == 0
    assert bool(stats.num_preemptions) == (num_blocks < 20)
    assert bool(stats.num_swapped_in_blocks) == bool(num_host_blocks)
    assert stats.prefix_hit_tokens % 4 == 0 and bool(stats.prefix_hit_tokens) == (index == "radix")


def test_sequences_of_a_request_share_whole_blocks_only(model):
    cache = cache_config(60, index="radix")
    limits = SchedulerConfig(8, 64, 32, 0.5, 0.0, steps_in_flight=2)
    runner = TorchRunner(model, REFERENCE, cache=cache, max_num_seqs=8, max_model_len=32)
    engine = Engine(Scheduler(limits, KVCache(cache)), runner, vocab_size=VOCAB)
    prompt, params = [3, 1, 4, 1, 5, 9], {"temperature": 30.0, "seed": 5, "max_tokens": 9}
    outputs = {}
    for name, n in (("three", 3), ("one", 1)):
        engine.add(Request(name, prompt, SamplingParams(**params, n=n)))
        while engine.has_work:
            for output in engine.step():
                outputs.setdefault((name, output.index), []).extend(output.token_ids)
    assert outputs["three", 0] == outputs["one", 0] and len(set(map(tuple, outputs.values()))) == 3
    assert engine.scheduler.cache.num_copied_tokens == 0
    with pytest.raises(RequestError, match="the beams of this model cannot share blocks"):
        engine.add(Request("beams", prompt, SamplingParams(max_tokens=4), beams=BEAMS))


def test_memory_of_one_plane_is_half_of_that_of_two():
    shape = ModelShape(
        vocab_size=VOCAB,
        max_positions=64,
        num_parameters=100,
        weight_bytes=400,
        weight_types="float32",
        activations_per_token=64,
        layers=(KIND,) * LAYERS,
    )
    options = EngineOptions(max_num_seqs=4, block_size=16)
    profile = memory_profile(shape, options, ("float32", "float32"), REFERENCE)
    (kv,) = profile.kv
    assert kv.bytes_per_token == LAYERS * KEY * 4
    assert kv.reason == "2 layers x 1 x 1 heads x 12 x 4 B"
    plan = plan_memory(profile, available=2**30, default_share=0.5, limit=None)
    made = make_cache_config(shape, "float32", plan, HostPoolPlan((0,), PlanLine("host pool", 0, "")))
    storage = REFERENCE.allocate(made.groups[0], 16, torch.device("cpu"))
    assert storage.data.nbytes == made.groups[0].num_blocks * made.groups[0].bytes_per_block


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
def test_blocks_leave_and_enter_in_the_canonical_layout(dtype):
    storages = [REFERENCE.allocate(KVGroup((0,), KIND, dtype, 6, 1), 4, torch.device("cpu")) for _ in range(2)]
    k = torch.randn(10, 1, KEY)
    q = torch.randn(10, HEADS, KEY)
    batch = Batch(np.array([0]), np.array([10]), np.array([[3, 1, 5]]))
    outputs = []
    plan = REFERENCE.plan(batch, storages[0])
    REFERENCE.rotary_write(storages[0], 0, q, k, k[..., :VALUE], None, plan)
    canonical = REFERENCE.pack(storages[0], torch.tensor([3, 1, 5]))
    assert canonical.shape[:5] == (1, 1, 3, 4, 1)
    REFERENCE.unpack(storages[1], torch.tensor([3, 1, 5]), canonical)
    for storage in storages:
        attend = PagedAttend(REFERENCE, [storage], [ScoreScaling(SCALE)])
        attend.plan([batch])
        outputs.append(REFERENCE.attention(storage, 0, q, REFERENCE.plan(batch, storage), SCALE))
    assert torch.equal(*outputs)
    expected = naive(q.numpy(), k.numpy(), k[..., :VALUE].numpy(), 0, SCALE)
    assert np.abs(outputs[0].numpy() - expected).max() < {"float32": 1e-5, "int8": 0.05, "int4": 0.4}[dtype]


def test_kernels_of_two_planes_refuse_it_by_name():
    demands = Requirements(torch.device("cpu"), "float32", "float32", 16, (KEY,), kv_kinds=(KIND,))
    chosen = choose("auto", demands)
    assert chosen.kernels.NAME == "reference"
    assert "keeps keys and values of 12 numbers each, not KV of the kind shared with 12" in chosen.reason
    with pytest.raises(ConfigError, match=r"planes of \(12, 8\) numbers have no canonical layout"):
        choose("reference", replace(demands, kv_kinds=(Uneven(1, KEY),)))
    with pytest.raises(ValueError, match=r"planes of \(12, 8\) numbers have no canonical layout"):
        REFERENCE.allocate(KVGroup((0,), Uneven(1, KEY), "float32", 2, 1), 4, torch.device("cpu"))
    assert kv_group((0,), 1, KEY, "float32", 2).kind.planes == (KEY, KEY)


class Uneven(KVKind, frozen=True, tag="uneven"):
    """Values of another size than keys, in a plane of their own."""

    name = "uneven"

    @property
    def value_dim(self):
        return VALUE
