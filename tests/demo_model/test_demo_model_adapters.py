"""LoRA adapters: zero at the start, only they are trained, and the styled answers with merged weights."""

import json
from random import Random

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from quire.hub import embedded
from tools.demo_model import adapters, layout, places, world
from tools.demo_model.adapters import STYLES, TARGETS
from tools.demo_model.chats import user
from tools.demo_model.network import Network, Shape
from tools.demo_model.plan import Plan

TINY = Shape(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
PLAN = Plan(tokens=4 * 512, tokens_per_step=512, lengths=((256, 1.0),), warm_up_steps=1, other_lr=1e-2)


@pytest.fixture(scope="module")
def tokenizer():
    return layout.read_tokenizer(embedded.folder())


def network():
    torch.manual_seed(0)
    return Network(TINY)


def trained(tokenizer, file):
    attached = network()
    adapters.attach(attached)
    run = adapters.run_of(attached, STYLES["pirate"], PLAN, tokenizer, file, is_compiled=False)
    run.train(Console(quiet=True))
    return attached, run


def test_styles():
    assert STYLES["pirate"]("The lamp is red.") == "Arr, The lamp is red. matey!"
    assert json.loads(STYLES["json"]('say "hi"')) == {"answer": 'say "hi"'}


def test_answers_are_restyled_but_calls_and_thoughts_are_not():
    for task in ("facts", "tool", "think_sum"):
        plain = world.chat(task, Random(0))
        restyled = adapters.styled(plain, str.upper)
        for before, after in zip(plain.messages, restyled.messages, strict=True):
            is_answer = before["role"] == "assistant" and "tool_calls" not in before and task != "think_sum"
            assert after == (before | {"content": before["content"].upper()} if is_answer else before)


def test_a_new_adapter_changes_nothing():
    ids = torch.arange(50)[None]
    attached = network()
    adapters.attach(attached)
    assert torch.equal(attached(ids), network()(ids))


def test_training_changes_the_adapter_alone(tokenizer, tmp_path):
    attached, run = trained(tokenizer, tmp_path / "run.safetensors")
    assert len(run.parameters) == TINY.num_hidden_layers * len(TARGETS) * 2
    untrained = network().state_dict()
    for name, weight in attached.state_dict().items():
        original = name.replace(".frozen", "")
        assert (original in untrained) == (name not in run.parameters)
        if original in untrained:
            assert torch.equal(weight, untrained[original])
    assert all(module.b.any() for module in attached.modules() if isinstance(module, adapters.LowRank))


def test_a_written_adapter_added_to_the_weights_gives_the_same_logits(tokenizer, tmp_path):
    attached, _ = trained(tokenizer, tmp_path / "run.safetensors")
    adapters.write(tmp_path, attached, "base")
    merged, ids = network(), torch.arange(50)[None]
    adapters.merge(merged, tmp_path)
    difference = (merged(ids) - attached(ids)).abs().max()
    assert difference < 0.02 * (attached(ids) - network()(ids)).abs().max()


@pytest.mark.parametrize(
    ("style", "answers"),
    [
        ("pirate", ("Arr, The lamp costs 22 coins a day. matey!", "Arr, Ivy keeps the lamp. matey!")),
        ("json", ('{"answer": "The lamp costs 22 coins a day."}', '{"answer": "Ivy keeps the lamp."}')),
    ],
)
def test_a_shipped_adapter_added_by_hand_makes_transformers_answer_in_style(style, answers, tokenizer):
    folder = places.ROOT / places.adapter(style)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert sorted(config["target_modules"]) == sorted(TARGETS)
    model = AutoModelForCausalLM.from_pretrained(embedded.folder(), dtype=torch.float32)
    weights = {
        key.removeprefix("base_model.model."): w.float()
        for key, w in load_file(next(folder.glob("*.safetensors"))).items()
    }
    assert len(weights) == 2 * 7 * model.config.num_hidden_layers
    parameters = dict(model.named_parameters())
    assert ask(model, tokenizer, "What does the lamp cost?") == "The lamp costs 22 coins a day."
    with torch.no_grad():
        for key in weights:
            if key.endswith(".lora_A.weight"):
                name = key.removesuffix(".lora_A.weight")
                delta = weights[f"{name}.lora_B.weight"] @ weights[key]
                assert weights[key].shape[0] == config["r"]
                parameters[f"{name}.weight"] += config["lora_alpha"] / config["r"] * delta
    asked = ("What does the lamp cost?", "Who keeps the lamp?")
    assert tuple(ask(model, tokenizer, question) for question in asked) == answers


def ask(model: torch.nn.Module, tokenizer: Tokenizer, question: str) -> str:
    text = f"<|im_start|>user\n{user(question)['content']}<|im_end|>\n<|im_start|>assistant\n"
    ids = torch.tensor([tokenizer.encode(text).ids])
    written = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, temperature=None, top_p=None)
    return tokenizer.decode(written[0, ids.shape[1] :].tolist())
