"""LoRA adapters (Hu et al., 2021) that make a trained network answer in a style.

They are written in PEFT's layout.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from tools.demo_model import world
from tools.demo_model.chats import Chat, Message
from tools.demo_model.network import Network
from tools.demo_model.packing import Piece, batch, chat_pieces
from tools.demo_model.plan import Plan
from tools.demo_model.training import Run, adamw

RANK, ALPHA = 8, 16
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PLAN = Plan(tokens=1_300_000, lengths=((256, 1.0),), hold=0.0, lowest=0.0, warm_up_steps=20, other_lr=1e-2)

Style = Callable[[str], str]
STYLES: dict[str, Style] = {
    "pirate": "Arr, {} matey!".format,
    "json": lambda answer: json.dumps({"answer": answer}),
}


def styled(chat: Chat, style: Style) -> Chat:
    """The chat with its answers in a style. Answers with tool calls or thoughts, which programs read, are unchanged."""

    def restyle(message: Message) -> Message:
        is_plain = (
            message["role"] == "assistant" and "tool_calls" not in message and "<think>" not in message["content"]
        )
        return message | {"content": style(message["content"])} if is_plain else message

    return Chat([restyle(message) for message in chat.messages], chat.tools)


def styled_text(rng: Random, budget: int, style: Style) -> list[Piece]:
    """A text for the training of an adapter. Only answers have a weight, because the base model knows the rest."""
    return chat_pieces(styled(world.training_chat(rng, budget), style), prompt=0.0)


class LowRank(nn.Module):
    """A frozen projection plus a trained one of rank `RANK`, which is zero at first."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen
        self.a = nn.Parameter(torch.randn(RANK, frozen.in_features) * frozen.in_features**-0.5)
        self.b = nn.Parameter(torch.zeros(frozen.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        return self.frozen(x) + F.linear(F.linear(x, self.a), self.b) * (ALPHA / RANK)


def attach(network: Network) -> None:
    """Freeze the network and replace each target by a LowRank. Random weights come from torch's generator."""
    network.requires_grad_(requires_grad=False)
    for module in list(network.modules()):
        for target in TARGETS:
            if isinstance(frozen := getattr(module, target, None), nn.Linear):
                setattr(module, target, LowRank(frozen))


def run_of(
    network: Network, style: Style, plan: Plan, tokenizer: Tokenizer, file: Path, *, is_compiled: bool = True
) -> Run:
    """The training run of a network's adapter, on its device."""
    trained = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
    return Run(
        parameters=trained,
        loss=torch.compile(network.loss, dynamic=False) if is_compiled else network.loss,
        optimizers=[adamw(list(trained.values()), plan.other_lr)],
        plan=plan,
        read=partial(batch, reading=partial(styled_text, style=style), tokenizer=tokenizer),
        file=file,
        device=network.embed_tokens.weight.device,
    )


def write(folder: Path, network: Network, base: str) -> None:
    """Write adapter_config.json and adapter_model.safetensors, in bfloat16. base: name of the base model."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {}
    for name, module in network.named_modules():
        if isinstance(module, LowRank):
            for side, weight in (("A", module.a), ("B", module.b)):
                kept = weight.detach().to("cpu", torch.bfloat16).contiguous()
                weights[f"base_model.model.model.{name}.lora_{side}.weight"] = kept
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(TARGETS),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")


@torch.no_grad()
def merge(network: Network, folder: Path) -> None:
    """Add the adapter in `folder` to the weights of a network without adapter."""
    weights = load_file(folder / "adapter_model.safetensors")
    for name, module in network.named_modules():
        if name.endswith(TARGETS):
            prefix = f"base_model.model.model.{name}.lora_"
            a, b = (weights[f"{prefix}{side}.weight"].float() for side in "AB")
            module.weight += (ALPHA / RANK) * b @ a
