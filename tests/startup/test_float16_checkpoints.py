"""A float16 checkpoint on a CPU: the dtype in which it is computed, and the line that says so."""

import shutil

import pytest
import torch
from random_checkpoints import save

from quire import LLM, SamplingParams
from quire.config import EngineOptions
from quire.errors import ConfigError
from quire.hub import embedded
from quire.kernels.cpu import EXTENSION
from quire.startup.build import prepare

pytestmark = pytest.mark.skipif(EXTENSION is not None, reason="the C++ kernels are not built")
PROMPTS = [{"prompt_token_ids": [5 + i, 6, 7, 40, 11] * 8} for i in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("float16")
    save(made, "llama-gqa-tied", dtype=torch.float16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded.folder() / name, made)
    return made


def prepared(folder, **options):
    """(kernels, dtype, KV dtype, the line about the dtype or "")."""
    lines: list[str] = []
    made = prepare(
        EngineOptions(model=str(folder), device="cpu", memory="200MiB", **options),
        report=lines.append,
        progress=lambda done, total: None,
    )
    line = next((" ".join(line.split()[1:]) for line in lines if line.startswith("dtype ")), "")
    return made.options.kernels, made.options.dtype, made.options.kv_cache_dtype, line


@pytest.mark.parametrize("kernels", ["auto", "cpu"])
def test_auto_computes_in_bfloat16_and_says_so(folder, kernels):
    *chosen, line = prepared(folder, kernels=kernels)
    assert chosen == ["cpu", "bfloat16", "bfloat16"]
    assert line.startswith("bfloat16 in place of the checkpoint's float16, because the C++ kernels have no float16")
    assert "--dtype float32" in line


def test_tokens_are_those_of_the_weights_in_bfloat16(folder):
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
    answers = []
    for options in ({}, {"dtype": "bfloat16"}, {"dtype": "float32"}):
        llm = LLM(str(folder), device="cpu", memory="200MiB", max_num_seqs=4, **options)
        outputs = [output.outputs[0] for output in llm.generate(PROMPTS, params, use_tqdm=False)]
        answers.append([(list(one.token_ids), one.cumulative_logprob) for one in outputs])
        llm.close()
    by_auto, in_bfloat16, in_float32 = answers
    assert by_auto == in_bfloat16 != in_float32
    assert len({tuple(tokens) for tokens, _ in by_auto}) == len(PROMPTS)


def test_explicit_float16_runs_in_plain_torch_and_names_the_faster_dtypes(folder):
    for name in ("float16", "half"):
        *chosen, line = prepared(folder, dtype=name)
        assert chosen == ["reference", "float16", "float16"]
        assert line == "float16 runs in plain torch, which is slow; --dtype bfloat16 and float32 run in C++"
    with pytest.raises(ConfigError, match="computes in float32 and bfloat16, not in float16"):
        prepared(folder, dtype="float16", kernels="cpu")


@pytest.mark.parametrize("options", [{"kernels": "reference"}, {"block_size": 8}, {"kv_cache_dtype": "float16"}])
def test_float16_stays_where_the_cpp_kernels_cannot_run(folder, options):
    kernels, dtype, _, line = prepared(folder, **options)
    assert (kernels, dtype, line) == ("reference", "float16", "")


def test_other_checkpoints_keep_their_dtype(folder):
    assert prepared(embedded.folder())[1::2] == ("bfloat16", "")
    assert prepared(folder, dtype="float32")[1::2] == ("float32", "")
