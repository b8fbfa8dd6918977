"""Train the embedded model, its draft model and its adapters from scratch, with one command and one seed.

An interrupted run continues from its checkpoints when the command is repeated. A finished run removes them.

python -m tools.demo_model.make                    # about an hour on one core
python -m tools.demo_model.make --device cuda
"""

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from rich.console import Console
from tokenizers import Tokenizer

from tools.demo_model import adapters, base, golden, layout, places, world
from tools.demo_model.network import Network, Shape
from tools.demo_model.plan import Plan
from tools.demo_model.tokens import train_tokenizer

NUM_VERIFIED = 20  # chats compared with transformers


@dataclass(frozen=True, slots=True)
class Making:
    """The options of a run."""

    root: Path
    device: str
    seed: int
    base_plan: Plan
    draft_plan: Plan
    adapter_plan: Plan
    is_compiled: bool
    tasks: Sequence[str]  # of the golden table
    num_chats: int  # for each of them
    console: Console

    def everything(self) -> None:
        """Make tokenizer, base model, draft model, adapters and golden table."""
        self.say("tokenizer")
        tokenizer = train_tokenizer(self.seed)
        self.model(base.BASE, self.base_plan, tokenizer, places.BASE)
        self.model(base.DRAFT, self.draft_plan, tokenizer, places.DRAFT)
        for style in adapters.STYLES:
            self.adapter(style, tokenizer)
        self.say("golden table")
        golden.save(self.root, golden.measure(self.root, self.tasks, self.num_chats))
        shutil.rmtree(self.root / places.CHECKPOINTS)

    def model(self, shape: Shape, plan: Plan, tokenizer: Tokenizer, folder: Path) -> None:
        """Train a model from random weights, write it, and verify it against transformers."""
        self.say(f"{folder}: {plan.tokens / 1e6:.1f} M tokens")
        torch.manual_seed(self.seed)
        network = Network(shape).to(self.device)
        run = base.run_of(network, plan, tokenizer, self.checkpoint(folder), is_compiled=self.is_compiled)
        run.train(self.console)
        layout.write(self.root / folder, network, tokenizer)
        rng = Random(self.seed)
        layout.verify(self.root / folder, [world.training_chat(rng) for _ in range(NUM_VERIFIED)])

    def adapter(self, style: str, tokenizer: Tokenizer) -> None:
        """Train an adapter on the written base model, whose weights are bfloat16, and write it."""
        folder, plan = places.adapter(style), self.adapter_plan
        self.say(f"{folder}: {plan.tokens / 1e6:.1f} M tokens")
        torch.manual_seed(self.seed)
        network = layout.read(self.root / places.BASE)
        adapters.attach(network)
        network.to(self.device)
        file = self.checkpoint(folder)
        adapters.run_of(network, adapters.STYLES[style], plan, tokenizer, file, is_compiled=self.is_compiled).train(
            self.console
        )
        adapters.write(self.root / folder, network, places.BASE.name)

    def checkpoint(self, folder: Path) -> Path:
        """The checkpoint file of a run. Creates its folder."""
        checkpoints = self.root / places.CHECKPOINTS
        checkpoints.mkdir(parents=True, exist_ok=True)
        return checkpoints / f"{folder.name}.safetensors"

    def say(self, what: str) -> None:
        """Print the step that begins."""
        self.console.print(f"making {what}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Make everything. arguments: the command line; None: sys.argv."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)

    making = Making(
        root=options.root,
        device=options.device,
        seed=options.seed,
        base_plan=base.BASE_PLAN.scaled(options.scale, options.seed),
        draft_plan=base.DRAFT_PLAN.scaled(options.scale, options.seed),
        adapter_plan=adapters.PLAN.scaled(options.scale, options.seed),
        is_compiled=not options.eager,
        tasks=options.tasks,
        num_chats=options.chats,
        console=Console(),
    )
    making.everything()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.demo_model.make", description="Make the embedded model.")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=1, help="of the cpu; a second one helps only on a quiet machine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="of all numbers of tokens; 0.001 is for trying out")
    parser.add_argument("--eager", action="store_true", help="do not compile: slower, but starts at once")
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=golden.GOLDEN_TASKS, help="to be scored")
    parser.add_argument("--chats", type=int, default=golden.CHATS, help="per task")
    parser.add_argument("--root", type=Path, default=places.ROOT, help="where the tree to write into begins")
    return parser


if __name__ == "__main__":
    main()
