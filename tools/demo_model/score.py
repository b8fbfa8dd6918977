"""Score the embedded model or another one: exact matches per task, with quire or transformers.

python -m tools.demo_model.score --chats 100 --tasks facts,recall@1024
python -m tools.demo_model.score --engine transformers --json answers.json
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import sqrt
from pathlib import Path

from quire.hub import embedded
from quire.tokenizer.tokenizer import Tokenizer
from tools.demo_model import world
from tools.demo_model.engines import ENGINES
from tools.demo_model.questions import questions

TASKS = [task for task in world.WEIGHTS if task != "story"]  # a story has no single right answer


@dataclass(frozen=True, slots=True)
class Answered:
    """A question and the model's answer."""

    task: str
    num_prompt_tokens: int
    expected: str
    text: str
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Score:
    """The score of a task. num_right: answers that match exactly."""

    task: str
    num_answers: int
    num_right: int

    @property
    def rate(self) -> float:
        """Share of exact matches."""
        return self.num_right / self.num_answers

    @property
    def error(self) -> float:
        """Standard error of the rate (binomial)."""
        return sqrt(self.rate * (1 - self.rate) / self.num_answers)

    def __str__(self) -> str:
        return f"{self.task:<14} {self.num_answers:>7} {self.rate:>11.3f} +- {self.error:.3f}"


@dataclass(frozen=True, slots=True)
class Run:
    """All answers. seconds: time for all of them together."""

    answers: list[Answered]
    seconds: float
    num_left_out: int  # questions too long for the model's context

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of all questions."""
        return sum(answer.num_prompt_tokens for answer in self.answers)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all answers."""
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def scores(self) -> list[Score]:
        """One score per task, in the order of the questions."""
        right: dict[str, list[bool]] = {}
        for answer in self.answers:
            right.setdefault(answer.task, []).append(answer.text == answer.expected)
        return [Score(task, len(matches), sum(matches)) for task, matches in right.items()]

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{'task':<14} {'answers':>7} {'exact match':>11}",
                *(str(score) for score in self.scores),
                f"{self.num_output_tokens} tokens out, {self.num_prompt_tokens} in, {self.seconds:.1f} s: "
                f"{self.num_output_tokens / self.seconds:.0f} tokens/s out, "
                f"{(self.num_output_tokens + self.num_prompt_tokens) / self.seconds:.0f} in all",
                *([f"{self.num_left_out} questions left out, too long for this model"] if self.num_left_out else []),
            ]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringRun:
    """The model and the tasks of a scoring run."""

    model: Path
    engine: str = "quire"
    dtype: str = "float32"
    options: Mapping[str, str] = field(default_factory=dict)  # of quire, such as kv_cache_dtype
    tasks: Sequence[str] = tuple(TASKS)
    chats: int = 24  # per task
    seed: int = 0

    def run(self) -> Run:
        """Answer all questions in one batch. Loading is not timed. Raises ValueError for an unknown task."""
        tokenizer = Tokenizer.from_folder(self.model)
        drawn = questions(self.tasks, self.chats, self.seed, tokenizer)
        longest = json.loads((self.model / "config.json").read_text())["max_position_embeddings"]
        asked = [question for question in drawn if question.num_tokens <= longest]
        answer = ENGINES[self.engine](self.model, self.dtype, self.options)
        start = time.perf_counter()
        answers = answer([question.prompt for question in asked])
        seconds = time.perf_counter() - start
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]
        return Run(
            [
                Answered(question.task, len(question.prompt), question.expected, text, ids)
                for question, text, ids in zip(asked, texts, answers, strict=True)
            ],
            seconds,
            len(drawn) - len(asked),
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the scores; with --json, also write scores and answers to a file."""
    asked = vars(_parser().parse_args(arguments))
    file = asked.pop("json")
    exam = ScoringRun(**asked | {"options": dict(asked["options"])})
    run = exam.run()
    print(run)
    if file is not None:
        scores = {score.task: {**asdict(score), "rate": score.rate, "error": score.error} for score in run.scores}
        file.write_text(json.dumps({"exam": asdict(exam), "scores": scores, **asdict(run)}, default=str, indent=1))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.demo_model.score", description="Exact matches per task.")
    parser.add_argument("--model", type=Path, default=embedded.folder(), help="folder [default: the embedded model]")
    parser.add_argument("--engine", choices=list(ENGINES), default="quire")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--option",
        dest="options",
        type=lambda text: text.split("=", 1),
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of quire, such as kv_cache_dtype=int8",
    )
    parser.add_argument(
        "--tasks", type=lambda text: text.split(","), default=TASKS, help="a,b,c; recall@1024 is longer"
    )
    parser.add_argument("--chats", type=int, default=24, help="per task")
    parser.add_argument("--seed", type=int, default=0, help="selects the chats")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep scores and every answer here")
    return parser


if __name__ == "__main__":
    main()
