"""Tables of adapters: of all products, by slot, for passes of several adapters."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise

import pytest
import random_checkpoints as checkpoints
import torch
from model_equality import prompt_of
from paged_model_forward import Sequences
from peft_adapters import save_matrices

from quire.kernels import reference
from quire.layers.linear import Linear
from quire.lora.peft import load_adapter, read_adapter
from quire.lora.peft_modules import Products
from quire.lora.tables import AdapterTables
from quire.models.decoder import Decoder
from quire.models.description import describe
from quire.models.loading import load

SHAPES = (
    {"model.layers.0.self_attn.q_proj": (64, 64), "model.layers.1.mlp.up_proj": (96, 64)},
    {"model.layers.1.mlp.gate_proj": (96, 64), "model.layers.2.self_attn.v_proj": (32, 64), "lm_head": (301, 64)},
)
KIND, UNTIED = "llama-3", {"tie_word_embeddings": False}


@pytest.fixture(scope="module")
def adapters(saved, tmp_path_factory):
    """(description, matrices of two adapters)."""
    description = describe(saved(KIND)[0])
    loaded = []
    for seed, shapes in enumerate(SHAPES):
        folder = tmp_path_factory.mktemp("adapter")
        save_matrices(folder, shapes, seed=seed)
        loaded.append(load_adapter(read_adapter(folder, "a", description, "float32"), description, "float32"))
    return description, loaded


class Served:
    """A decoder with tables of two slots."""

    def __init__(self, adapters):
        self.description, self.matrices = adapters
        self.model = load(self.description, dtype="float32")
        self.tables = AdapterTables(self.model, reference, 2)
        self.packed = [self.tables.pack(matrices) for matrices in self.matrices]

    def logits(self, prompts, slots):
        sequences = Sequences(self.description, self.model, [len(prompt) for prompt in prompts])
        sequences.slots, sequences.width = slots, max(map(self.tables.width, self.packed))
        return sequences.logits([(row, 0, prompt) for row, prompt in enumerate(prompts)])


@pytest.fixture
def served(adapters):
    return Served(adapters)


@pytest.mark.parametrize("kind", checkpoints.EVERY)
def test_exactly_the_products_that_have_a_table_can_be_adapted(saved, kind):
    description = describe(saved(kind)[0])
    model = Decoder(description.config, torch.float32)
    products, found = Products(description), set()
    for name in description.weight_map:
        with suppress(LookupError):
            found.add(products.find(name.removesuffix(".weight"))[1].parameter)
    AdapterTables(model, reference, 1)
    linears = {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, Linear)}
    assert found == set(linears)
    assert None not in [linear.adapter_table for linear in linears.values()]


def test_the_classification_head_has_no_table(tmp_path):
    checkpoints.save(tmp_path, "llama-mha", head=checkpoints.classifier, num_labels=3, pad_token_id=0)
    model = load(describe(tmp_path), dtype="float32")
    AdapterTables(model, reference, 1)
    assert model.class_head is not None and model.class_head.adapter_table is None


def test_each_token_of_a_pass_has_the_adapter_of_its_sequence(served):
    served.tables.put(1, served.packed[0])
    served.tables.put(2, served.packed[1])
    prompts, slots = [prompt_of(length) for length in (5, 9, 7, 6)], [2, 0, 1, 2]
    together = served.logits(prompts, slots).split([len(prompt) for prompt in prompts])
    for prompt, slot, found in zip(prompts, slots, together, strict=True):
        assert torch.allclose(found, served.logits([prompt], [slot]), atol=1e-5)
    alone = [served.logits([prompts[0]], [slot]) for slot in (0, 1, 2)]
    assert all((one - other).abs().max() > 0.1 for one, other in pairwise(alone))


def test_an_empty_slot_adds_nothing_and_a_slot_can_be_replaced_and_emptied(served):
    prompt = prompt_of(6)
    plain = served.logits([prompt], [0])
    served.tables.put(2, served.packed[0])
    first = served.logits([prompt], [2])
    served.tables.put(1, served.packed[0])
    assert torch.equal(served.logits([prompt], [1]), first)
    served.tables.put(2, served.packed[1])  # whose parameters are others
    second = served.logits([prompt], [2])
    served.tables.put(1, served.packed[1])
    assert torch.equal(served.logits([prompt], [1]), second)
    assert not torch.allclose(first, second, atol=1e-3)
    served.tables.put(2, None)
    assert torch.equal(served.logits([prompt], [2]), plain)
    assert torch.equal(served.logits([prompt], [1]), second)


def test_the_width_is_that_of_the_widest_product(served):
    assert [served.tables.width(packed) for packed in served.packed] == [4, 4]
    both = {"layers.0.mlp.up.weight": [*served.matrices[0]["layers.1.mlp.up.weight"]]}
    both["layers.0.mlp.up.weight"] += served.matrices[1]["layers.1.mlp.up.weight"]
    assert served.tables.width(served.tables.pack(both)) == 8


def test_threads_may_pack_at_the_same_time(served):
    with ThreadPoolExecutor(4) as pool:
        packed = list(pool.map(served.tables.pack, served.matrices * 8))
    prompt = prompt_of(4)
    for index, one in enumerate(packed):
        served.tables.put(1, one)
        served.tables.put(2, served.packed[index % 2])
        assert torch.equal(served.logits([prompt], [1]), served.logits([prompt], [2]))
