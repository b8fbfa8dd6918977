"""The training loop of models and adapters.

Loss, parameters and the source of batches are arguments.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from tools.demo_model import checkpoint
from tools.demo_model.muon import Muon
from tools.demo_model.packing import Batch
from tools.demo_model.plan import Plan

SECONDS_BETWEEN_CHECKPOINTS = 120
STEPS_BETWEEN_LINES = 50

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # a Batch's fields -> a scalar
Read = Callable[[Random, int, int], Batch]  # number of rows, tokens per row


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run."""

    parameters: dict[str, Parameter]
    loss: Loss
    optimizers: Sequence[Optimizer]
    plan: Plan
    read: Read
    file: Path  # the checkpoint; a run that finds one goes on from there
    device: torch.device

    def train(self, console: Console) -> None:
        """Run the remaining steps, with checkpoints in `file`."""
        first = checkpoint.restore(self.file, self.plan.seed, self.parameters, self.optimizers)
        columns = (
            *(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,.0f} tokens")),
            *(TextColumn("loss {task.fields[loss]:.3f}"), TimeRemainingColumn(elapsed_when_finished=True)),
        )
        with Progress(*columns, console=console, transient=True) as progress:
            shown = progress.add_task(self.file.stem, total=self.plan.tokens, loss=0.0)
            self._steps(first, lambda tokens, loss: progress.update(shown, completed=tokens, loss=loss), console)

    def _steps(self, first: int, show: Callable[[int, float], None], console: Console) -> None:
        started = saved = time.perf_counter()
        losses: list[float] = []
        for step in range(first, self.plan.num_steps):
            losses.append(self.step(step))
            num_tokens, now = (step + 1) * self.plan.tokens_per_step, time.perf_counter()
            show(num_tokens, losses[-1])
            if len(losses) == STEPS_BETWEEN_LINES:
                speed = (step + 1 - first) * self.plan.tokens_per_step / (now - started)
                mean = sum(losses) / len(losses)
                console.print(
                    f"{self.file.stem}: {num_tokens / 1e6:.2f} M tokens, loss {mean:.4f}, {speed:.0f} tokens/s"
                )
                losses.clear()
            if now - saved > SECONDS_BETWEEN_CHECKPOINTS:
                self.save(step + 1)
                saved = now
        self.save(self.plan.num_steps)

    def save(self, step: int) -> None:
        progress = checkpoint.Progress(step, self.plan.seed)
        checkpoint.save(self.file, progress, self.parameters, self.optimizers)

    def step(self, step: int) -> float:
        """Run one step with one update of the parameters. Returns the loss before the update."""
        length = self.plan.row_length(step)
        rng = Random(f"{self.plan.seed}-{step}")
        batch = self.read(rng, self.plan.tokens_per_step // length, length)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.loss(*(tensor.to(self.device) for tensor in batch))
        loss.backward()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["full_lr"] * self.plan.pace(step)
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()


def optimizers_of(network: nn.Module, plan: Plan) -> list[Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the gains."""
    named = dict(network.named_parameters())
    matrices = [p for name, p in named.items() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named.items() if p.ndim != 2 or "embed" in name]
    return [
        Muon([{"params": matrices, "full_lr": plan.matrix_lr}], plan.matrix_lr),
        adamw(others, plan.other_lr),
    ]


def adamw(parameters: Sequence[Parameter], lr: float) -> Optimizer:
    """AdamW without weight decay and with a short memory of squared gradients (beta2 = 0.95)."""
    group = {"params": list(parameters), "full_lr": lr}
    return torch.optim.AdamW([group], lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
