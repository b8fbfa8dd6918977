"""Greedy tokens and logprobs of short chats with expanded weights in float32, against transformers.

Each token must be the one that transformers ranks first after the same tokens, so whole outputs are equal. The chats
have no near-tie: the first two logits differ by more than kernels do.
"""

import pytest
import torch
from real_model import reference_logits

from quire import LLM, SamplingParams

CHATS = (
    "What is the capital of France?",
    "Name three primary colours.",
    "Count from one to ten.",
    "What is 2 + 3?",
    "Translate 'good morning' to Spanish.",
    "Who wrote Romeo and Juliet?",
    "What do bees make?",
    "Give me a recipe for pancakes.",
    "Explain gravity to a child.",
    "What is the opposite of hot?",
    "Write a Python function that adds two numbers.",
    "How many days are in a week?",
    "What is the largest planet?",
    "List four fruits.",
    "Why is the sky blue?",
    "Write a short poem about a cat.",
    "What is photosynthesis?",
    "Is water wet?",
    "What is a prime number?",
    "Tell me a joke.",
)
NUM_TOKENS = 20
_NEAR_TIE = 0.01  # of logits; kernels differ from transformers by less than 0.001


def chat(llm, texts=CHATS, num_tokens=NUM_TOKENS, **params):
    asked = SamplingParams(temperature=0, max_tokens=num_tokens, **params)
    messages = [[{"role": "user", "content": text}] for text in texts]
    return llm.chat(messages, asked, use_tqdm=False)


def assert_greedy(reference, outputs):
    """The tokens are those of transformers; where an output ends, so would that of transformers."""
    for output in outputs:
        tokens = [*output.outputs[0].token_ids]
        logits = reference_logits(reference, output.prompt_token_ids + tokens, len(output.prompt_token_ids))
        best = logits.topk(2)
        assert (best.values[:, 0] - best.values[:, 1]).min() > _NEAR_TIE, "choose another chat"
        assert best.indices[:, 0].tolist() == tokens, output.outputs[0].text


@pytest.mark.parametrize("deterministic", [False, True])
def test_greedy_tokens_are_those_of_transformers(exact_llm, reference, deterministic):
    outputs = chat(exact_llm, deterministic=deterministic)
    assert {len(output.outputs[0].token_ids) for output in outputs} <= set(range(1, NUM_TOKENS + 1))
    assert sum(len(output.outputs[0].token_ids) for output in outputs) > 10 * len(CHATS)
    assert_greedy(reference, outputs)


def test_the_reference_kernels_write_the_same(file, reference):
    """Triton's kernels are not tested here: in the interpreter a step of this model takes minutes."""
    options = {"dtype": "float32", "quantization": "none", "memory": "2GiB", "max_model_len": 256}
    llm = LLM(str(file), kernels="reference", calibration=0, max_num_seqs=20, **options)
    assert_greedy(reference, chat(llm, num_tokens=16))
    llm.close()


def test_logprobs_are_those_of_transformers(exact_llm, reference):
    for output in chat(exact_llm, CHATS[:4], 8, logprobs=3):
        (one,) = output.outputs
        ids = [*output.prompt_token_ids, *one.token_ids]
        expected = reference_logits(reference, ids, len(output.prompt_token_ids)).log_softmax(-1)
        for row, position in zip(one.logprobs, expected, strict=True):
            best = position.topk(3)
            assert set(best.indices.tolist()) <= set(row)
            found = torch.tensor([row[token].logprob for token in best.indices.tolist()])
            assert (found - best.values).abs().max() < 2e-3
