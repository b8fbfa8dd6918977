"""Text like that of the embedded model's training: random chats and stories, for calibration of quantized weights.

python -m tools.demo_model.sample_text OUT --seed 7 --characters 200000
"""

import argparse
from pathlib import Path
from random import Random

from tools.demo_model import world
from tools.demo_model.packing import world_text
from tools.demo_model.tokens import END_OF_TEXT


def sample(seed: int, num_characters: int) -> str:
    """Texts one after another, each with the token that ends it, of at least `num_characters` characters."""
    rng, texts, size = Random(f"sample-{seed}"), list[str](), 0
    while size < num_characters:
        texts.append("".join(piece.text for piece in world_text(rng, world.BUDGET)) + END_OF_TEXT)
        size += len(texts[-1])
    return "".join(texts)


def main() -> None:
    """Write a sample to a file."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo_model.sample_text")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--characters", type=int, default=200_000)
    args = parser.parse_args()
    args.out.write_text(sample(args.seed, args.characters), encoding="utf-8")


if __name__ == "__main__":
    main()
