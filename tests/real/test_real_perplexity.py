"""Perplexity of two texts: low-bit weights and KV over exact ones, within the floors."""

from math import prod
from pydoc_data.topics import topics

import pytest
from real_model import license_text

from quire import LLM
from quire.startup.perplexity import perplexity

NUM_TOKENS = 1024  # of each text


@pytest.fixture(scope="module")
def texts(served_llm):
    tokenizer = served_llm.get_tokenizer()
    wanted = {"license": license_text(), "reference": "\n".join(topics[name] for name in sorted(topics))}
    return {name: tokenizer.encode(text[: 16 * NUM_TOKENS])[:NUM_TOKENS] for name, text in wanted.items()}


def perplexities(llm, texts):
    return {name: perplexity(llm.llm_engine, ids) for name, ids in texts.items()}


@pytest.fixture(scope="module")
def exact(exact_llm, texts):
    return perplexities(exact_llm, texts)


@pytest.fixture(scope="module")
def served(served_llm, texts):
    return perplexities(served_llm, texts)


def test_exact_weights_read_the_texts_well(exact):
    assert all(5 < value < 30 for value in exact.values()), exact


def mean_ratio(found, exact):
    """The geometric mean over the texts: one text alone varies by 0.003 between roundings of the same accuracy."""
    return prod(found[name] / exact[name] for name in exact) ** (1 / len(exact))


def test_weights_as_stored_cost_little(exact, served):
    assert mean_ratio(served, exact) < 1.003


@pytest.mark.parametrize(("kv", "floor"), [("int8", 1.004), ("int4", 1.03)])
def test_low_bit_kv_costs_little(file, texts, exact, kv, floor):
    options = {"dtype": "float32", "quantization": "none", "memory": "2GiB", "max_model_len": 2048}
    llm = LLM(str(file), kv_cache_dtype=kv, calibration=0, **options)
    found = perplexities(llm, texts)
    llm.close()
    assert any(found[name] != exact[name] for name in found)
    assert mean_ratio(found, exact) < floor
