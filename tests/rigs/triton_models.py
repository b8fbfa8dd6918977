"""Whole models on the Triton kernels, whose steps are captured by CUDA graphs on a GPU and computed again on a CPU."""

import numpy as np
from changed_kernels import changed
from model_runner_driver import Driver, load_model
from triton_device import DEVICE

from quire import LLM, SamplingParams
from quire.kernels.triton import step_capture
from quire.kernels.triton.deterministic import TRITON_DETERMINISTIC as deterministic
from quire.kernels.triton.kernels import TRITON as kernels_module

BLOCK = 16
LENGTHS = (3, 18, 1)


class Replaying(step_capture.CudaGraphCapture):
    """On a CPU, replays a step by computing it again, as there are no graphs. All else is as on a GPU."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def capture(self, compute):
        if DEVICE.type == "cuda":
            result, play = super().capture(compute)
        else:
            result = compute()
        self.sizes.append(len(result))
        return result, play if DEVICE.type == "cuda" else lambda: result.copy_(compute())


def driver(folder, *, recorder=None, model=None):
    """A driver of a model with the Triton kernels. recorder: of captured steps; None: there are none."""
    model = model or load_model(folder, device=str(DEVICE))
    kernels = changed(kernels_module, new_step_capture=lambda: recorder)
    return Driver(model, block_size=BLOCK, num_blocks=40, kernels=kernels, strict=deterministic)


def prompts_of_models():
    """Prompts of LENGTHS tokens, always the same."""
    random = np.random.default_rng(6)
    return [random.integers(3, 301, length).tolist() for length in LENGTHS]


def assert_answers_are_those_of_the_reference(**options):
    """Compare the embedded model's tokens on the Triton kernels with those on plain torch."""
    greedy = SamplingParams(temperature=0, max_tokens=3)
    question = [{"role": "user", "content": "What is 2 plus 3?"}]
    texts = []
    for kernels, device in (("triton", str(DEVICE)), ("reference", "cpu")):
        lines = []
        llm = LLM(kernels=kernels, device=device, **options, memory="1GiB", report=lines.append)
        texts.append(llm.chat(question, greedy)[0].outputs[0].token_ids)
        assert any(line.startswith(f"kernels    {kernels}") for line in lines)
    assert texts[0] == texts[1]
    assert len(texts[0]) > 0
