"""Captured steps on CPUs: equal to uncaptured steps bit for bit, in any order of batches."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from changed_kernels import changed
from hypothesis import given, settings
from hypothesis import strategies as st
from low_rank_oracle import CASES, Adapted
from model_runner_driver import GREEDY, Driver, RowParams, copy_move, load_model

from quire import LLM
from quire.core.step import TableUpdates
from quire.kernels import choose
from quire.kernels.contract import NotCapturable, replace_kernels
from quire.params import SamplingParams

_C = pytest.importorskip("quire.kernels.cpu._C", reason="the CPU kernels are not built", exc_type=ImportError)
memory = pytest.importorskip("quire.kernels.cpu.memory")
kernels_module = pytest.importorskip("quire.kernels.cpu.kernels")
deterministic = pytest.importorskip("quire.kernels.cpu.deterministic").CPU_DETERMINISTIC
rowwise = pytest.importorskip("quire.kernels.cpu.rowwise")

ROWS = 8
BLOCK = 16
RECORDED = ["qwen3-gqa", "llama-gqa-tied", "llama-mqa-biases", "phi3", "mistral-window", "qwen3-moe", "mixtral-window"]
SPECIAL = [  # with scaled queries or sums, xIELU, groups of experts, gates of heads, shared KV, inputs of layers
    *("ministral3", "apertus", "glm4-moe-groups", "trinity", "laguna", "cohere2", "nemotron", "granite-moe-shared"),
    *(
        "hunyuan",
        "gemma2",
        "qwen2-moe",
        "falcon-40b",
        "granite",
        "phi-moe",
        "smollm3",
        "gemma4-moe",
        "gemma4-shared-kv",
    ),
]
COMPUTED = ["gpt2", "opt-post-norm"]  # each is partly plain torch


def watched(*, recorded):
    """The kernels with a list `logits` of those from which tokens are sampled."""
    logits_so_far = []

    def sample(logits, draws):
        logits_so_far.append(logits.clone())
        return kernels_module.sample(logits, draws)

    capture = kernels_module.new_step_capture if recorded else lambda: None
    return changed(kernels_module, sample=sample, new_step_capture=capture, logits=logits_so_far)


@pytest.fixture
def played(monkeypatch):
    """A list that grows with each replayed step."""
    counts, play = [], _C.play

    def counting(tape):
        counts.append(1)
        play(tape)

    monkeypatch.setattr(_C, "play", counting)
    return counts


@pytest.fixture(params=[1, 2])
def threads(request):
    """Number of kernel threads."""
    _C.set_threads(request.param)
    yield request.param
    _C.set_threads(1)


def driver_of(folder, *, recorded, dtype="float32", **options):
    kernels = watched(recorded=recorded)
    model = load_model(folder, dtype, kernels)
    options = {"rows": ROWS, "block_size": BLOCK, **options}
    return Driver(model, kernels=kernels, strict=deterministic, **options), kernels


class Script:
    """Random rows that start, decode in varying batches, are preempted, and whose blocks move."""

    def __init__(self, driver, seed, params=GREEDY):
        self.driver, self.params = driver, params
        self.random = np.random.default_rng(seed)
        self.known, self.done, self.tokens = {}, {}, []

    def run(self, num_steps):
        """Run `num_steps` steps. Returns the sampled tokens of all steps so far."""
        for _ in range(num_steps):
            ready = [row for row, known in self.known.items() if self.done[row] == len(known) - 1]
            if not ready or self.random.random() < 0.2:
                self._step(ready[: self.random.integers(0, 3)], self._comers())
            else:
                some = self.random.permutation(ready)[: self.random.integers(1, len(ready) + 1)].tolist()
                self._step(some, [])
                if self.random.random() < 0.2:
                    self._move(some[0])
        return self.tokens

    def _comers(self):
        """Rows that compute a new prompt, or their known tokens after a preemption."""
        rows = self.random.permutation(ROWS)[: self.random.integers(1, 4)].tolist()
        for row in rows:
            preempted = row in self.known and len(self.known[row]) < 150 and self.random.random() < 0.7
            if not preempted:
                self.known[row] = self.random.integers(3, 301, self.random.integers(1, 60)).tolist()
            self.done[row] = 0
        return rows

    def _step(self, decoding, comers):
        rows = [*(row for row in decoding if row not in comers), *comers]
        chunks = [(row, self.done[row], len(self.known[row])) for row in rows]
        params = RowParams(self.params)
        opening = {
            "opens": [(row, params) for row in comers],
            "tokens": [(row, 0, list(self.known[row])) for row in comers],
        }
        result = self.driver.run(chunks, **opening)
        self.tokens.append(result.tokens.tolist())
        for (row, _, stop), token in zip(chunks, result.tokens.tolist(), strict=True):
            self.done[row] = stop
            self.known[row].append(token)

    def _move(self, row):
        """Move one block of a row to another place, and overwrite the old one."""
        driver = self.driver
        writes, moves = [], []
        for group, tables in enumerate(driver.tables[row]):
            place = int(self.random.integers(len(tables)))
            old, new = tables[place], driver.free[group].pop()
            tables[place] = new
            writes.append(TableUpdates.of([(row, place, [new])]))
            moves.append(copy_move(group, [(old, new)], BLOCK))
        driver.run([], blocks=writes, moves=moves)
        spare = driver.free[0].pop()
        driver.run([], moves=[copy_move(group, [(spare, old)], 0) for group in range(len(writes))])


def assert_alike(one, other):
    assert len(one) == len(other)
    for found, expected in zip(one, other, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", RECORDED)
def test_recorded_steps_have_the_bits_of_others(saved, played, kind, dtype):
    """Batches vary, prompts are computed between decode steps, rows are preempted and blocks move."""
    folder = saved(kind)[0]
    found, watched = driver_of(folder, recorded=True, dtype=dtype)
    tokens = Script(found, 1).run(120)
    assert len(played) > 60
    del played[:]
    expected, plain = driver_of(folder, recorded=False, dtype=dtype)
    assert Script(expected, 1).run(120) == tokens
    assert_alike(watched.logits, plain.logits)
    assert not played


@pytest.mark.parametrize("kind", SPECIAL)
def test_every_operation_of_a_block_is_recorded(saved, played, kind):
    folder = saved(kind)[0]
    found, watched = driver_of(folder, recorded=True, dtype="bfloat16")
    tokens = Script(found, 6).run(30)
    assert len(played) > 10
    expected, plain = driver_of(folder, recorded=False, dtype="bfloat16")
    assert Script(expected, 6).run(30) == tokens
    assert_alike(watched.logits, plain.logits)


@pytest.mark.parametrize("options", [{"block_size": 32}, {"num_groups": 2}, {"max_model_len": 249}])
def test_the_layout_of_memory_changes_nothing(saved, played, threads, options):
    del threads
    folder = saved("qwen3-gqa")[0]
    found, watched = driver_of(folder, recorded=True, **options)
    expected, plain = driver_of(folder, recorded=False, **options)
    sampled = SamplingParams(temperature=0.9, seed=5, logprobs=3, frequency_penalty=0.4)
    assert Script(found, 2, sampled).run(60) == Script(expected, 2, sampled).run(60)
    assert_alike(watched.logits, plain.logits)
    assert len(played) > 20


@pytest.mark.parametrize("kind", COMPUTED)
def test_models_that_need_torch_are_not_recorded_and_still_right(saved, played, kind):
    folder = saved(kind)[0]
    found, watched = driver_of(folder, recorded=True)
    expected, plain = driver_of(folder, recorded=False)
    assert Script(found, 3).run(40) == Script(expected, 3).run(40)
    assert_alike(watched.logits, plain.logits)
    assert not played


def test_prompts_that_were_generated_are_those_of_the_reference(saved, played):
    folder = saved("qwen3-gqa")[0]
    prompts = [np.random.default_rng(n).integers(3, 301, n).tolist() for n in (5, 33, 1, 18)]
    driver, _ = driver_of(folder, recorded=True)
    assert driver.generate(prompts, 40) == Driver(load_model(folder)).generate(prompts, 40)
    assert len(played) == 38  # all except the prompts and the first step of its size


def test_a_result_says_whether_its_step_was_captured(saved):
    """The first of its number of tokens, which takes longer than the others."""
    driver, _ = driver_of(saved("qwen3-gqa")[0], recorded=True)
    params, known = RowParams(GREEDY), {0: [5, 6, 7], 1: [8, 9]}
    opening = {"opens": [(row, params) for row in known], "tokens": [(row, 0, ids) for row, ids in known.items()]}
    results = [driver.run([(0, 0, 3), (1, 0, 2)], **opening)]
    for rows in ([0, 1], [0, 1], [0], [1]):
        chunks = []
        for row in rows:
            known[row].append(10)
            chunks.append((row, len(known[row]) - 1, len(known[row])))
        tokens = [(row, stop - 1, [10]) for row, _, stop in chunks]
        results.append(driver.run(chunks, tokens=tokens))
    assert [result.captured for result in results] == [True, True, False, True, False]


def test_deterministic_sequences_are_not_recorded(saved, played):
    folder = saved("qwen3-gqa")[0]
    driver, _ = driver_of(folder, recorded=True)
    params_of_rows = [GREEDY, SamplingParams(temperature=0.0, deterministic=True)]
    driver.generate([[5, 6, 7], [8, 9]], 6, params_of_rows)
    assert not played
    assert driver.generate([[5, 6, 7], [8, 9]], 6) == Driver(load_model(folder)).generate([[5, 6, 7], [8, 9]], 6)
    assert len(played) == 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_with_drafts_are_recorded_by_their_number_of_tokens(saved, played, dtype):
    """Chunks of any length. Recorded steps have the bits of others, and rejected drafts are overwritten."""
    folder, random = saved("qwen3-gqa")[0], np.random.default_rng(4)
    steps = []
    starts = {row: int(random.integers(1, 40)) for row in range(6)}
    for _ in range(30):
        rows = random.permutation(6)[: random.integers(1, 7)].tolist()
        steps.append([(row, int(random.integers(0, 9)), int(random.integers(0, 9))) for row in rows])

    def run(driver):
        known = {row: random_tokens(row, length) for row, length in starts.items()}
        done, found = dict.fromkeys(known, 0), []
        opening = {
            "opens": [(row, GREEDY) for row in known],
            "tokens": [(row, 0, tokens) for row, tokens in known.items()],
        }
        for rows in steps:
            chunks, writes = [], []
            for row, num_drafts, num_accepted in rows:
                at = len(known[row])
                drafts = random_tokens(row + at, num_drafts)
                chunks.append((row, row, done[row], at + num_drafts, num_drafts, num_drafts + 1, 1))
                writes.append((row, done[row], [*known[row][done[row] :], *drafts]))
                known[row] += [*drafts[:num_accepted], 3 + num_accepted]
                done[row] = len(known[row]) - 1
            opening.setdefault("tokens", []).extend(writes)
            result = driver.run(chunks, **opening)
            opening = {}
            found.append(result.tokens.tolist())
        return found

    found, watched = driver_of(folder, recorded=True, dtype=dtype)
    expected, plain = driver_of(folder, recorded=False, dtype=dtype)
    assert run(found) == run(expected)
    assert_alike(watched.logits, plain.logits)
    assert len(played) >= 5


def random_tokens(seed, number):
    return np.random.default_rng(seed).integers(3, 301, number).tolist()


def test_large_steps_are_computed_without(saved, played):
    driver, _ = driver_of(saved("qwen3-gqa")[0], recorded=True, rows=70)
    prompts = [[3 + n, 5] for n in range(65)]
    assert driver.generate(prompts, 4) == Driver(load_model(saved("qwen3-gqa")[0]), rows=70).generate(prompts, 4)
    assert not played
    driver.generate(prompts[:64], 4)
    assert len(played) == 2


def test_two_runners_at_the_same_time_do_not_disturb_each_other(saved, threads):
    del threads
    folder = saved("qwen3-gqa")[0]
    expected = [Script(driver_of(folder, recorded=True)[0], seed).run(60) for seed in (4, 5)]
    drivers = [driver_of(folder, recorded=True)[0] for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            found = pool.map(lambda driver, seed: Script(driver, seed).run(60), drivers, (4, 5))
            assert list(found) == expected


def test_a_tape_computes_again_from_what_its_inputs_are_now():
    kernels, capture = kernels_module, kernels_module.new_step_capture()
    x, weight = torch.randn(3, 20), torch.randn(20)
    result, play = capture.capture(lambda: kernels.activate(kernels.rms_norm(x, weight, 1e-6), "silu"))
    for _ in range(3):
        assert torch.equal(result, kernels.activate(kernels.rms_norm(x, weight, 1e-6), "silu"))
        x.copy_(torch.randn(3, 20))
        play()
    before = result.clone()
    x.zero_()
    assert torch.equal(result, before)  # until the replay


@pytest.mark.parametrize(
    ("names", "compute"),
    [
        ("mul", lambda x: x * 2),
        ("add", lambda x: x[:1] + x[1:]),
        ("clone|contiguous", lambda x: x.t().contiguous()),
        ("zeros", lambda x: torch.zeros(3)),
        ("cat", lambda x: torch.cat((x, x))),
        ("to|_to_copy", lambda x: x.bfloat16()),
        ("copy_", lambda x: torch.empty(2, 3).copy_(x)),
        ("item|_local_scalar_dense", lambda x: torch.empty(int(x[0, 0]))),
        ("pad|constant_pad_nd", lambda x: torch.nn.functional.pad(x, (0, 1))),
        ("linear|mm|t", lambda x: torch.nn.functional.linear(x, x)),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_operations_of_torch_are_not_capturable_and_the_error_names_them(names, compute, inference):
    kernels, capture = kernels_module, kernels_module.new_step_capture()
    with torch.inference_mode(inference):
        x = torch.ones(2, 3)
        with pytest.raises(NotCapturable, match=rf"^({names}) is computed by torch$"):
            capture.capture(lambda: kernels.activate(compute(x), "relu"))


def test_views_and_empty_tensors_can_be_recorded():
    kernels, capture = kernels_module, kernels_module.new_step_capture()
    x = torch.randn(4, 6)

    def compute():
        first, second = kernels.activate(x, "silu").view(4, 2, 3).unbind(1)
        half = torch.empty(2, 4, 3).select(0, 1)
        half_like = torch.empty_like(half), x.new_empty(4, 3)
        assert {part.dtype for part in (half, *half_like)} == {torch.float32}
        assert all(part.shape == (4, 3) for part in half_like)
        return rowwise.gate(torch.as_strided(first, (4, 6), (6, 1)), "relu") if second is not None else first

    result, play = capture.capture(compute)
    x.neg_()
    play()
    assert torch.equal(result, rowwise.gate(kernels.activate(x, "silu"), "relu"))


def test_an_exception_leaves_no_tape_behind(saved):
    kernels, capture = kernels_module, kernels_module.new_step_capture()
    x = torch.randn(2, 3)

    def fail():
        kernels.activate(x, "silu")
        raise KeyError("broken")

    def twice():
        return capture.capture(lambda: x)[0]

    for compute, error in ((fail, KeyError), (lambda: x + 1, NotCapturable), (twice, RuntimeError)):
        with pytest.raises(error):
            capture.capture(compute)
        with pytest.raises(RuntimeError, match="no tape is being recorded"):
            _C.stop()
        assert torch.equal(torch.empty(3).fill_(1), torch.ones(3))  # torch allocates normally again
    result, play = capture.capture(lambda: kernels.activate(x, "silu"))
    x.neg_()
    play()
    assert torch.equal(result, kernels.activate(x, "silu"))


def test_a_step_that_fails_while_it_is_recorded_can_be_recorded_later(saved, played):
    driver, kernels = driver_of(saved("qwen3-gqa")[0], recorded=True)
    prompts = [[5, 6, 7], [8, 9]]
    opening = {"opens": [(0, GREEDY), (1, GREEDY)], "tokens": [(0, 0, prompts[0]), (1, 0, prompts[1])]}
    first = driver.run([(0, 0, 3), (1, 0, 2)], **opening).tokens.tolist()
    norm = kernels.rms_norm
    kernels.rms_norm = None
    with pytest.raises(TypeError):
        driver.run([(0, 3, 4), (1, 2, 3)])
    kernels.rms_norm = norm
    found = [driver.run([(0, 3 + step, 4 + step), (1, 2 + step, 3 + step)]).tokens.tolist() for step in range(5)]
    expected = Driver(load_model(saved("qwen3-gqa")[0])).generate(prompts, 6)
    assert [list(tokens) for tokens in zip(first, *found, strict=True)] == expected
    assert len(played) == 4


# ---- memory ----


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 3000), st.sampled_from(["take", "view", "drop"])), max_size=60), st.booleans())
def test_no_buffer_is_given_to_two_live_tensors(actions, keeps):
    arena = memory.Arena(never_free=keeps)
    alive = []  # (tensor, the number that fills it)
    for number, (size, action) in enumerate(actions):
        if action == "take" or not alive:
            x = arena.empty((size, 2), torch.float32)
            assert x.shape == (size, 2)
            assert x.data_ptr() % 64 == 0 or not size
            x.fill_(number)
            alive.append((x, number))
        elif action == "view":  # the tensor is freed, a view of it stays
            x, value = alive.pop(size % len(alive))
            alive.append((x[len(x) // 2 :].T, value))
        else:
            alive.pop(size % len(alive))
        for x, value in alive:
            assert (x == value).all()


def test_a_buffer_is_used_again_when_its_tensor_is_gone():
    arena = memory.Arena(never_free=True)
    addresses = set()
    for size in range(70, 129):
        x = arena.empty((size,), torch.uint8)
        addresses.add(x.data_ptr())
        del x
    assert len(addresses) == 1
    kept = arena.empty((1000,), torch.uint8)
    assert kept[10:].data_ptr() - 10 == kept.data_ptr()
    assert arena.empty((1000,), torch.uint8).data_ptr() != kept.data_ptr()


@pytest.mark.parametrize("keeps", [True, False])
def test_buffers_that_became_too_small_are_given_back_unless_tapes_know_them(keeps):
    arena = memory.Arena(never_free=keeps)
    held = arena.empty((20_000,), torch.uint8)
    addresses = {arena.empty((size,), torch.uint8).data_ptr() for size in (5000, 40_000, 100_000)}
    assert len(addresses) == 3
    arena.empty((1_000_000,), torch.uint8)
    known = {address for address in arena.buffers if address in addresses}
    assert known == (addresses if keeps else set())
    held.fill_(1)
    assert held.data_ptr() in arena.buffers


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not tell")
@pytest.mark.parametrize("huge", [True, False])
def test_whole_pages_of_weights_are_huge_where_the_system_has_them(huge):
    tensor = memory.pages(5 * 2**20, huge=huge)
    mapped, flags = {}, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) (....)", line):
            mapped = {"begin": int(found[1], 16), "end": int(found[2], 16), "rights": found[3]}
        elif line.startswith("VmFlags:") and mapped["begin"] <= tensor.data_ptr() < mapped["end"]:
            flags = line.split()
            break
    assert mapped["rights"] == "rw-p", "shared memory has no huge pages"
    assert ("hg" in flags) == (huge and Path("/sys/kernel/mm/transparent_hugepage").exists())
    if huge:
        assert tensor.data_ptr() % 2**21 == 0
        assert mapped["end"] - tensor.data_ptr() == 2 * 2**21, "a page that is needed in part is not taken whole"


@pytest.fixture
def given_out(monkeypatch):
    """address -> bytes of the buffers that arenas have allocated"""
    buffers, empty = {}, memory.Arena.empty

    def counting(self, shape, dtype):
        x = empty(self, shape, dtype)
        buffers[x.data_ptr()] = max(buffers.get(x.data_ptr(), 0), x.nbytes)
        return x

    monkeypatch.setattr(memory.Arena, "empty", counting)
    return buffers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_have_the_adapters_of_the_replay(threads, dtype):
    kernels, capture = kernels_module.CPU, kernels_module.new_step_capture()
    adapted = Adapted(kernels, CASES["gated"], dtype)
    slots = torch.zeros_like(adapted.slots)

    def compute():
        addend = kernels.low_rank(adapted.x, adapted.table, slots, adapted.width)
        inner = kernels.gated_linear(adapted.x, adapted.weight, adapted.bias, "silu", addend)
        return kernels.activate(inner, "relu")

    result, replay = capture.capture(compute)
    for order in (slice(None), torch.randperm(len(slots), generator=torch.Generator().manual_seed(threads))):
        slots.copy_(adapted.slots[order])
        replay()
        found = result.clone()
        assert torch.equal(found, compute())
    kernels.set_adapter(adapted.table, 3, kernels.pack_adapter(adapted.weight, adapted.matrices[1]))
    replay()
    assert not torch.equal(result, found)
    assert torch.equal(result, compute())


def test_all_sizes_of_a_step_together_take_little_more_than_the_largest(saved, given_out):
    folder = saved("qwen3-gqa")[0]
    prompts = [[3 + n, 5] for n in range(64)]

    def bytes_for(sizes):
        given_out.clear()
        driver, _ = driver_of(folder, recorded=True, rows=64)
        driver.generate(prompts, 1)
        for size in sizes:
            driver.run([(row, 2, 3) for row in range(size)])
        return sum(given_out.values())

    assert bytes_for(range(1, 65)) < 3 * bytes_for([64])


def test_recording_again_takes_no_more_memory(given_out):
    kernels, capture = kernels_module, kernels_module.new_step_capture()
    x, weight = torch.randn(9, 40), torch.randn(40)

    def compute():
        y = x
        for _ in range(5):
            y, _ = kernels.add_rms_norm(y, x, weight, 1e-6)
        return y

    capture.capture(compute)
    after_one = dict(given_out)
    for _ in range(20):
        capture.capture(compute)
    assert given_out.keys() == after_one.keys()
    assert len(given_out) <= 4


def test_an_engine_that_has_nothing_to_do_keeps_no_large_buffers(monkeypatch):
    arena = memory.Arena(never_free=False)
    monkeypatch.setattr(memory._thread, "arena", arena)
    sizes = []
    rest = memory.release_workspace
    kernels = replace_kernels(
        kernels_module.CPU, release_workspace=lambda: (sizes.append([size for size, _ in arena.free]), rest())
    )
    monkeypatch.setattr(choose, "CPU", kernels)
    llm = LLM(kernels="cpu", memory="256MiB", dtype="float32", max_model_len=1100)
    llm.generate([[5] * 1024], SamplingParams(max_tokens=1), use_tqdm=False)
    assert max(sizes[-1]) >= 2**21, "what the prompt was computed in"
    assert arena.free and max(size for size, _ in arena.free) < 2**21
    assert set(arena.buffers) == {address for _, address in arena.free}
