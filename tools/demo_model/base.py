"""The base model and its draft model, trained from random weights."""

from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer

from tools.demo_model.network import Network, Shape
from tools.demo_model.packing import batch, world_text
from tools.demo_model.plan import Plan
from tools.demo_model.training import Run, optimizers_of

BASE = Shape()
DRAFT = Shape(hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=1)
BASE_PLAN = Plan(tokens=15_000_000)
DRAFT_PLAN = Plan(tokens=5_000_000, lengths=((256, 0.8), (1024, 0.2)))


def run_of(network: Network, plan: Plan, tokenizer: Tokenizer, file: Path, *, is_compiled: bool = True) -> Run:
    """The training run of a network, on its device. Compilation takes 20 s per row length."""
    return Run(
        parameters=dict(network.named_parameters()),
        loss=torch.compile(network.loss, dynamic=False) if is_compiled else network.loss,
        optimizers=optimizers_of(network, plan),
        plan=plan,
        read=partial(batch, reading=world_text, tokenizer=tokenizer),
        file=file,
        device=network.embed_tokens.weight.device,
    )
