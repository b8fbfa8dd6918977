"""vLLM computes the same logprobs as quire from a checkpoint of `quire quantize`.

VLLM_PYTHON names an interpreter that has vLLM. Without it the tests are skipped.

VLLM_PYTHON=VENV/bin/python python -m pytest tests/startup/test_quantize_in_vllm.py
"""

import json
import os
import shutil
import subprocess

import pytest
import torch

import quire
from quire.hub import embedded

PYTHON = os.environ.get("VLLM_PYTHON")
pytestmark = pytest.mark.skipif(PYTHON is None, reason="VLLM_PYTHON is not set")

PROMPT = [(7 * i + 3) % 301 for i in range(60)]
SCRIPT = f"""
import json, sys
from vllm import LLM, SamplingParams, TokensPrompt
params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
for folder in sys.argv[1:]:
    try:
        llm = LLM(folder, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=128)
        (out,) = llm.generate([TokensPrompt(prompt_token_ids={PROMPT})], params, use_tqdm=False)
        found = [next(iter(position.values())).logprob for position in out.prompt_logprobs[1:]]
        del llm  # its end closes the process groups, which the next one opens
    except Exception as error:
        found = str(error)
    print("FOUND", json.dumps(found), flush=True)
"""
SCHEMES = ("int8", "fp8", "int4", "mxfp4", "nvfp4")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of a random checkpoint under "plain", and of its quantized forms under their schemes."""
    import random_checkpoints  # noqa: PLC0415  (it imports transformers, which a skipped test does not need)

    found = {name: tmp_path_factory.mktemp("model") / name for name in ("plain", *SCHEMES)}
    random_checkpoints.save(found["plain"], "qwen3-gqa", dtype=torch.bfloat16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded.folder() / name, found["plain"])
    for scheme in SCHEMES:
        quire.quantize(found["plain"], found[scheme], scheme, report=lambda _: None, progress=lambda *_: None)
    return found


@pytest.fixture(scope="module")
def in_vllm(folders):
    """By scheme, vLLM's logprobs of PROMPT, or its error."""
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    settings |= {"VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": ""}
    done = subprocess.run(
        [PYTHON, "-c", SCRIPT, *map(str, folders.values())],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **settings},
        check=False,
    )
    found = [json.loads(line.removeprefix("FOUND ")) for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert len(found) == len(folders), done.stderr[-2000:]
    return dict(zip(folders, found, strict=True))


def logprobs(folder):
    """quire's logprobs of PROMPT."""
    llm = quire.LLM(str(folder), dtype="bfloat16", memory="256MiB", report=lambda _: None)
    params = quire.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (out,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    llm.close()
    return torch.tensor([next(iter(position.values())).logprob for position in out.prompt_logprobs[1:]])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_logprobs_are_those_of_quire(folders, in_vllm, scheme):
    if isinstance(in_vllm[scheme], str):
        assert "kernel" in in_vllm[scheme]
        pytest.skip(in_vllm[scheme])
    found, expected = torch.tensor(in_vllm[scheme]), logprobs(folders[scheme])
    assert (found - expected).abs().mean() < (0.08 if scheme == "fp8" else 0.03)  # there x is rounded to float8, too
    effect = (torch.tensor(in_vllm["plain"]) - found).abs().mean()
    assert scheme in ("int8", "fp8") or (found - expected).abs().mean() < effect / 4
