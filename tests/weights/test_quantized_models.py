"""Models whose weights are rounded at load: memory, results of both kernel modules, and the effect of the options."""

import pytest
import random_checkpoints as checkpoints
import torch
from paged_model_forward import Sequences

from quire import LLM, SamplingParams
from quire.config import EngineOptions
from quire.errors import ConfigError, ModelError
from quire.kernels import reference
from quire.kernels.contract import PackedWeight
from quire.kernels.deterministic import DETERMINISTIC as deterministic
from quire.models.description import describe
from quire.models.loading import load
from quire.models.transformers import describe_transformers
from quire.startup.build import build
from quire.weights.checkpoint import FolderCheckpoint
from quire.weights.schemes import AT_LOAD

_C = pytest.importorskip("quire.kernels.cpu._C", reason="the CPU kernels are not built", exc_type=ImportError)
cpu = pytest.importorskip("quire.kernels.cpu.kernels").CPU

KINDS = ["llama-gqa-tied", "qwen2-upper-window", "qwen2-moe", "mixtral-window", "gpt2", "gemma2", "opt-post-norm"]
OTHERS = [  # with other layouts of weights: fused, stacked, in rotary pairs, with gates and activations of their own
    *("glm4", "arcee-biases", "nemotron-biases", "apertus", "granite-moe-shared", "ernie4-5-moe", "laguna"),
    *("qwen3-next", "lfm2", "granite-hybrid", "nemotron-h", "nemotron-3-latent"),
]
INTEGERS = ("int8", "int4")
PROMPTS = ["The capital of France is", "ENGLISH TO FRENCH: the red house ->"]


def weights_of(model):
    """Name -> weight, of parameters and packed weights."""
    found = dict(model.named_parameters())
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, PackedWeight):
                found[f"{path}.{name}"] = value
    return found


def logits_of(description, model, kernels, tokens):
    sequences = Sequences(description, model, [len(tokens)], kernels=kernels)
    cut = len(tokens) - 5
    steps = [(0, tokens[:cut]), *((start, tokens[start : start + 1]) for start in range(cut, len(tokens)))]
    return torch.cat([sequences.logits([(0, start, some)]) for start, some in steps])


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in checkpoints.EVERY for name in (AT_LOAD if kind in KINDS else INTEGERS)]
)
def test_weights_have_their_schemes_and_the_planned_bytes(saved, kind, name):
    description = describe(saved(kind)[0])
    schemes = description.schemes(name)
    model = load(description, dtype="bfloat16", schemes=schemes)
    total = 0
    for path, weight in weights_of(model).items():
        assert (weight.scheme if isinstance(weight, PackedWeight) else None) == schemes.get(path), path
        total += weight.num_bytes if isinstance(weight, PackedWeight) else weight.nbytes
    assert total == description.weight_bytes("bfloat16", schemes) < description.weight_bytes("bfloat16")
    layers, head = AT_LOAD[name]
    assert schemes["embed.weight" if description.config.tied else "head.weight"] == head
    projections = ("attention.qkv.weight", "recurrence.inputs.weight", "mlp.up.weight")
    assert any(schemes.get(f"layers.0.{projection}") == layers for projection in projections)
    assert not any("router" in path or "norm" in path or "gate" in path for path in schemes)


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in KINDS for name in AT_LOAD] + [(kind, "int4") for kind in OTHERS]
)
def test_logits_of_the_cpu_kernels_are_those_of_plain_torch(saved, kind, name):
    description = describe(saved(kind)[0])
    tokens = [7 * i % description.vocab_size for i in range(40)]
    found = {
        kernels: logits_of(
            description,
            load(description, dtype="float32", kernels=kernels, schemes=description.schemes(name)),
            kernels,
            tokens,
        )
        for kernels in (reference, deterministic, cpu)
    }
    exact = logits_of(description, load(description, dtype="float32"), reference, tokens)
    width = exact.max() - exact.min()
    for kernels in (deterministic, cpu):
        different = (found[kernels] - found[reference]).abs().max()
        assert different < 0.02 * width, kernels.NAME  # a code of x may be rounded to the other side
    error = (found[cpu] - exact).abs().median()  # single tokens may take another expert
    assert 0 < error < (0.01 if name == "int8" else 0.1) * width


@pytest.mark.parametrize("name", AT_LOAD)
def test_the_embedded_model_answers(name):
    lines = []
    llm = LLM(quantization=name, memory="256MiB", max_model_len=512, report=lines.append)
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    together = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy, use_tqdm=False)]
    apart = [llm.generate([prompt], greedy, use_tqdm=False)[0].outputs[0].token_ids for prompt in PROMPTS]
    assert together == apart
    assert all(len(answer) > 0 for answer in together)
    assert any(line.startswith("weights    rounded: ") for line in lines)
    assert any(f"M parameters, {AT_LOAD[name][0].type_name} and" in line for line in lines)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"quantization": "int3"}, "quantization: Invalid enum value 'int3'"),
        ({"quantization": "awq"}, "names the layout of a checkpoint, but .* is not quantized; leave it out"),
        ({"quantization": "bitsandbytes"}, "'bitsandbytes' is not supported; use int8 or int4"),
    ],
)
def test_options_that_cannot_work_are_named(options, why):
    with pytest.raises(ConfigError, match=why):
        build(EngineOptions(**options), report=lambda line: None, progress=lambda done, total: None)


def test_transformers_as_a_backend_says_that_it_keeps_the_type(saved):
    description = describe_transformers(FolderCheckpoint(saved("llama-gqa-tied")[0]))
    with pytest.raises(ModelError, match="keeps its weights in dtype; leave quantization out"):
        description.schemes("int8")
    assert not description.schemes(None) and not description.schemes("none")
