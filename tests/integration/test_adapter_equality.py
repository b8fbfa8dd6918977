"""The whole engine with adapters of several ranks, and none, in its batches: tokens and logprobs are PEFT's (fp32)."""

import shutil
from concurrent.futures import Future
from queue import SimpleQueue

import pytest
import torch
from engine_equality_cases import GREEDY, make, prompts
from peft_adapters import products, save_adapter
from random_checkpoints import VOCAB, save

from quire.core.adapter import Adapter
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.hub import embedded
from quire.params import SamplingParams

RANKS = (1, 3, 16)
INVOCATION = [7, 11, 5]
LENGTHS = [2, 15, 16, 40, 33, 90, 64, 7]


def read(engine: Engine, folder) -> Adapter:
    found: SimpleQueue[Future[Adapter]] = SimpleQueue()
    engine.read_adapter(folder.name, str(folder), found.put)
    return found.get().result()


def run(engine: Engine, requests) -> list[tuple[list[int], list[float]]]:
    """Tokens and their logprobs of (prompt, adapter, params), which arrive at once."""
    for i, (prompt, adapter, params) in enumerate(requests):
        engine.add(Request(str(i), prompt, SamplingParams(**GREEDY | {"logprobs": 0} | params), adapter=adapter))
    found: list[tuple[list[int], list[float]]] = [([], []) for _ in requests]
    while engine.has_work:
        for output in engine.step():
            assert not output.error
            tokens, logprobs = found[int(output.request_id)]
            tokens += output.token_ids
            logprobs += [] if output.logprobs is None else output.logprobs.values[:, 0].tolist()
    assert engine.stats().failed_steps == 0
    return found


def folder_of(folder, kind):
    """A checkpoint of a kind with a tokenizer, and its model."""
    theirs = save(folder, kind)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded.folder() / name, folder)
    theirs.generation_config.eos_token_id = None
    return theirs


@torch.inference_mode()
def assert_theirs(model, prompt, found, *, offset=None):
    """Compare greedy tokens and logprobs. offset: where an activated adapter applies."""
    tokens, logprobs = found
    sequence = torch.tensor([prompt + tokens])
    more = {} if offset is None else {"alora_offsets": [sequence.shape[1] - offset]}
    logits = model(sequence, **more).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == tokens
    expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs), expected, rtol=0, atol=3e-5 * float(logits.max() - logits.min()))


FEW_BLOCKS = {"max_num_batched_tokens": 48, "max_num_seqs": 6, "max_model_len": 160}
FEW_BLOCKS |= {"memory": "1.5MiB", "lora_memory": "0.3MiB"}  # leaves 24 blocks
SCHEDULES = {
    "chunked": {"max_num_batched_tokens": 23},
    "few in memory": {"max_loras": 2},
    "two in flight": {"steps_in_flight": 2, "max_num_seqs": 4},
    "few blocks": FEW_BLOCKS,
    "swapped": FEW_BLOCKS | {"preemption": "swap", "swap_space": "4MiB"},
}


@pytest.mark.parametrize("kind", ["llama-gqa-tied", "gpt2", "phi3", "falcon-40b", "qwen3-moe", "gemma2"])
def test_mixed_adapters_are_those_of_peft(kind, tmp_path):
    """Every schedule at once: chunks, prefix hits, and a second round with the KV of the first."""
    theirs = folder_of(tmp_path / "model", kind)
    models = [theirs]
    for rank in RANKS:
        names = products(theirs) if rank != 3 else products(theirs)[::2]
        models.append(
            save_adapter(tmp_path / f"rank-{rank}", theirs, r=rank, lora_alpha=2 * rank, target_modules=names)
        )
    engine = make(tmp_path / "model", enable_lora=True, max_num_batched_tokens=48, max_num_seqs=6)
    adapters = [None, *(read(engine, tmp_path / f"rank-{rank}") for rank in RANKS)]
    requests = [(prompt, adapters[i % 4], {"max_tokens": 12 + i}) for i, prompt in enumerate(prompts(LENGTHS, VOCAB))]
    again = [(prompt, adapters[(i + 1) % 4], params) for i, (prompt, _, params) in enumerate(requests)]
    for asked, shift in ((requests, 0), (again, 1), (requests, 0)):
        for i, found in enumerate(run(engine, asked)):
            assert_theirs(models[(i + shift) % 4], asked[i][0], found)
    assert engine.stats().prefix_hit_tokens > 0


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A checkpoint, its adapted models, and the folders of their adapters."""
    folder = tmp_path_factory.mktemp("small")
    theirs = folder_of(folder / "model", "llama-gqa-tied")
    models = [save_adapter(folder / f"rank-{rank}", theirs, r=rank) for rank in RANKS]
    models.append(save_adapter(folder / "activated", theirs, r=8, alora_invocation_tokens=INVOCATION))
    return folder, theirs, models


@pytest.mark.parametrize("options", SCHEDULES.values(), ids=SCHEDULES)
def test_the_schedule_changes_no_token(small, options):
    folder, _, models = small
    engine = make(folder / "model", enable_lora=True, **options)
    adapters = [read(engine, folder / f"rank-{rank}") for rank in RANKS]
    requests = [
        (prompt, adapters[i % 3], {"max_tokens": 48}) for i, prompt in enumerate(prompts(LENGTHS * 2, VOCAB, seed=5))
    ]
    for i, found in enumerate(run(engine, requests)):
        assert_theirs(models[i % 3], requests[i][0], found)
    stats = engine.stats()
    if "max_loras" in options:
        assert stats.num_evicted_adapters > 0
    if "memory" in options:
        assert stats.num_preemptions > 0
    assert (stats.num_swapped_in_blocks > 0) == ("swap_space" in options)


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_activated_adapter_applies_from_its_last_invocation_on(small, deterministic):
    """It begins within a block, with and without KV that the model alone and other adapters have computed."""
    folder, theirs, models = small
    engine = make(folder / "model", enable_lora=True, max_num_batched_tokens=29)
    activated, plain = read(engine, folder / "activated"), read(engine, folder / "rank-3")
    assert activated.invocation_tokens == tuple(INVOCATION)
    talk = [token for token in prompts([70], VOCAB)[0] if token not in INVOCATION]
    params = {"max_tokens": 9, "deterministic": deterministic}
    first = [*INVOCATION, *talk[:37]]
    cases = [
        (talk, None, theirs, None),
        ([*talk, *INVOCATION, 20, 21], activated, models[3], len(talk)),
        ([*first, *INVOCATION, 30], activated, models[3], len(first)),
        ([*first, 30], activated, models[3], 0),
        (talk, activated, theirs, None),
        ([*talk, *INVOCATION, 20], plain, models[1], None),
        ([*talk[:60], *INVOCATION, 5], activated, models[3], 60),
    ]
    for prompt, adapter, model, offset in cases * 2:
        assert_theirs(model, prompt, run(engine, [(prompt, adapter, params)])[0], offset=offset)
    stats = engine.stats()
    run(engine, [([*talk, *INVOCATION, 40, 41], activated, params)])
    computed = engine.stats().prompt_tokens - stats.prompt_tokens
    hits = engine.stats().prefix_hit_tokens - stats.prefix_hit_tokens
    assert computed == len(talk) + len(INVOCATION) + 2
    assert hits >= len(talk)


def test_a_deterministic_request_has_the_same_logprobs_alone_and_in_company(small):
    folder, _, _ = small
    engine = make(folder / "model", enable_lora=True, enable_prefix_caching=False)
    adapters = [read(engine, folder / f"rank-{rank}") for rank in RANKS]
    some = prompts(LENGTHS, VOCAB, seed=9)
    requests = [(prompt, adapters[i % 3], {"deterministic": i % 2 == 0}) for i, prompt in enumerate(some)]
    together = run(engine, requests)
    for i in range(0, len(requests), 2):
        assert run(engine, [requests[i]])[0] == together[i]
