"""TorchRunner with adapters: each row has its own, from its start on. Merged weights in transformers are the oracle."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from kv_groups import kv_group
from model_runner_driver import GREEDY, Driver, RowParams, load_model
from peft_adapters import merge, save_matrices

from quire.config import CacheConfig
from quire.core.step import Chunks, NewRows, Step, TableUpdates
from quire.kernels import reference
from quire.lora.loaded import LoadedAdapters
from quire.lora.peft import load_adapter, read_adapter
from quire.lora.tables import AdapterTables
from quire.models.decoder import Decoder
from quire.models.description import describe
from quire.params import SamplingParams
from quire.runner.rows import Rows

NUM_SLOTS = 3
ATTENTION = {"model.layers.0.self_attn.q_proj": (64, 64), "model.layers.2.self_attn.v_proj": (32, 64)}
MLP = {"model.layers.1.mlp.gate_proj": (96, 64), "model.layers.1.mlp.up_proj": (96, 64)}
PROMPTS = [np.random.default_rng(5).integers(3, 301, length).tolist() for length in (5, 33, 12, 18)]
NUM_TOKENS = 16
CACHE = CacheConfig(4, (kv_group((0,), 1, 8, "float32", 8, 1),))


class Served(NamedTuple):
    folder: object
    adapters: list[str]  # digests of two adapters, the second of which is wider
    matrices: list[object]  # of these
    expected: list[list[list[int]]]  # tokens of the prompts: without an adapter, with the first, with the second

    def driver(self, kernels=reference, **options) -> Driver:
        """A runner in whose memory both adapters are."""
        model = load_model(self.folder, kernels=kernels)
        assert isinstance(model, Decoder)
        tables = AdapterTables(model, kernels, NUM_SLOTS)
        loaded = LoadedAdapters(tables)
        for digest, matrices in zip(self.adapters, self.matrices, strict=True):
            loaded.add(digest, tables.pack(matrices))
        return Driver(model, kernels=kernels, adapters=loaded, **options)


@pytest.fixture(scope="module")
def served(saved, tmp_path_factory):
    folder, theirs = saved("llama-3")
    description, models, digests, matrices = describe(folder), [theirs], [], []
    for seed, shapes in enumerate((ATTENTION, MLP)):
        path = tmp_path_factory.mktemp("adapter")
        models.append(merge(theirs, save_matrices(path, shapes, seed=seed)))
        adapter = read_adapter(path, "some", description, "float32")
        digests.append(adapter.digest)
        matrices.append(load_adapter(adapter, description, "float32"))
    return Served(folder, digests, matrices, [[tokens_of(model, prompt) for prompt in PROMPTS] for model in models])


def tokens_of(model, prompt):
    whole = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return whole[0, len(prompt) :].tolist()


def generate(driver, which, **options):
    """Greedy tokens of the prompts. which: slot of each."""
    return driver.generate(PROMPTS, NUM_TOKENS, [RowParams(GREEDY, slot=slot) for slot in which], **options)


@pytest.mark.parametrize("cut", [7, 100])
def test_each_row_has_its_adapter(served, cut):
    driver, (first, second) = served.driver(), served.adapters
    found = generate(driver, [2, 0, 3, 2], cut=cut, adapters=[(2, first), (3, second)])
    assert found == [served.expected[which][i] for i, which in enumerate([1, 0, 2, 1])]
    assert generate(driver, [0] * 4, cut=cut) == served.expected[0], "the rows are opened without adapters"
    assert len({str(tokens) for tokens in served.expected}) == 3
    assert generate(driver, [2] * 4, adapters=[(2, second)]) == served.expected[2], "in place of the one before"


def test_a_reset_step_puts_adapters_into_other_slots(served):
    driver, (first, second) = served.driver(), served.adapters
    generate(driver, [1, 2, 1, 2], adapters=[(1, first), (2, second)])
    known = PROMPTS[1] + served.expected[1][1][:9]
    result = driver.run(
        [(0, 0, len(known))],
        reset=True,
        opens=[(0, RowParams(GREEDY, slot=2))],
        tokens=[(0, 0, known)],
        adapters=[(1, second), (2, first)],
    )
    assert result.tokens.tolist() == [served.expected[1][1][9]]


def test_an_adapter_applies_from_its_start_on(served):
    """KV before the start is that of the model alone."""
    driver, start, prompt = served.driver(), 20, PROMPTS[1]

    def logprob(row, begin, where, **options):
        params = RowParams(SamplingParams(temperature=0.0, logprobs=0), slot=1, adapter_start=where)
        opening = {"opens": [(row, params)], "tokens": [(row, 0, prompt)], **options}
        return driver.run([(row, begin, len(prompt))], **opening).logprobs.values[0, 0]

    found = logprob(0, 0, start, adapters=[(1, served.adapters[0])])
    driver.run([(1, 1, 0, start, 0, 0, 0)], opens=[(1, GREEDY)], tokens=[(1, 0, prompt)])
    rest = -(-(len(prompt) - start) // driver.cache.block_size)
    tables = [[*table, *free[-rest:]] for table, free in zip(driver.tables[1], driver.free, strict=True)]
    blocks = [TableUpdates.of([(1, 0, table)]) for table in tables]
    assert found == pytest.approx(logprob(1, start, 0, blocks=blocks), abs=1e-5)
    assert abs(found - logprob(2, 0, 0)) > 1e-3, "it would be seen if it applied everywhere"


def test_tokens_have_the_slot_of_their_row_from_its_start_on():
    rows = Rows(CACHE, max_num_seqs=4, max_model_len=16, vocab_size=10, num_slots=9)
    chunks = Chunks.of([(2, 0, 3, 6, 0, 0, 0), (0, 1, 0, 2, 0, 0, 0), (1, 2, 0, 3, 0, 0, 0), (3, 3, 7, 8, 0, 0, 0)])
    assert rows.adapter_slots(chunks) is None
    opens = NewRows.of(rows=[0, 1, 2], seq_ids=[1, 2, 0], adapters=[0, 9, 4], adapter_starts=[0, 1, 5])
    nothing = TableUpdates.of([])
    rows.apply(Step(id=1, reset=False, opens=opens, tokens=nothing, blocks=[nothing], moves=[], chunks=chunks))
    found = rows.adapter_slots(chunks)
    assert found.dtype == np.int32
    assert found.tolist() == [0, 0, 4, 0, 0, 0, 9, 9, 0]
    before = Chunks.of([(2, 0, 0, 5, 0, 0, 0), (0, 1, 0, 2, 0, 0, 0)])
    assert rows.adapter_slots(before) is None, "no adapter applies yet"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adapters": [(1, "unknown")]}, "the adapter unknown is not in memory"),
        ({"adapters": [(0, ...)]}, "slot 0 of an adapter is not from 1 to 3"),
        ({"adapters": [(4, ...)]}, "slot 4 of an adapter is not from 1 to 3"),
        ({"slot": 4}, "some of the step's slots are not from 0 to 3"),
        ({"slot": -1}, "some of the step's slots are not from 0 to 3"),
    ],
)
def test_steps_with_adapters_out_of_bounds_are_refused(served, changes, message):
    driver = served.driver()
    adapters = [(slot, served.adapters[0] if digest is ... else digest) for slot, digest in changes.get("adapters", ())]
    opens = [(0, RowParams(GREEDY, slot=changes.get("slot", 0)))]
    with pytest.raises(ValueError, match=message):
        driver.run([(0, 0, 2)], opens=opens, tokens=[(0, 0, [5, 6])], adapters=adapters)


@pytest.mark.parametrize("changes", [{"adapters": [(1, "some")]}, {"slot": 1}])
def test_a_runner_without_adapters_refuses_them(served, changes):
    opens = [(0, RowParams(GREEDY, slot=changes.get("slot", 0)))]
    with pytest.raises(ValueError, match="this runner has no adapters"):
        Driver(load_model(served.folder)).run(
            [(0, 0, 2)], opens=opens, tokens=[(0, 0, [5, 6])], adapters=changes.get("adapters", ())
        )


class TestCaptured:
    """Steps that the CPU kernels capture."""

    @pytest.fixture
    def driver(self, served):
        pytest.importorskip("quire.kernels.cpu._C", reason="the CPU kernels are not built", exc_type=ImportError)
        from quire.kernels.cpu.deterministic import CPU_DETERMINISTIC  # noqa: PLC0415
        from quire.kernels.cpu.kernels import CPU  # noqa: PLC0415

        return served.driver(CPU, strict=CPU_DETERMINISTIC, block_size=16)

    def test_steps_with_and_without_adapters_are_captured_apart(self, served, driver):
        first, second = served.adapters
        assert generate(driver, [1, 0, 2, 2], adapters=[(1, first), (2, second)]) == [
            served.expected[which][i] for i, which in enumerate([1, 0, 2, 2])
        ]
        assert generate(driver, [0] * 4) == served.expected[0]
        mixed = [2, 1, 0, 1]
        assert generate(driver, mixed) == [served.expected[which][i] for i, which in enumerate(mixed)]
        assert generate(driver, [0] * 4) == served.expected[0]

    def test_a_step_is_captured_again_only_for_a_wider_adapter(self, served, driver):
        first, second = served.adapters
        captured = []

        def decode(*adapters, slot=1):
            opens = [(0, RowParams(GREEDY, slot=slot))]
            driver.run([(0, 0, 5)], opens=opens, tokens=[(0, 0, PROMPTS[0])], adapters=adapters)
            tokens = []
            for position in range(5, 8):
                result = driver.run([(0, position, position + 1)])
                captured.append(result.captured)
                tokens += result.tokens.tolist()
            return tokens

        assert decode((1, first)) == served.expected[1][0][1:4]
        assert decode(slot=0) == served.expected[0][0][1:4]
        assert decode((1, second)) == served.expected[2][0][1:4]
        driver.adapters.drop(second)
        assert decode((1, first)) == served.expected[1][0][1:4], "the wider one is replayed"
        first_of_size = [True, False, False]
        assert captured == [*first_of_size * 3, False, False, False]
