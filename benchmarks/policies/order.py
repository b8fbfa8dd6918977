"""R2: hit rate of each queue policy, as a share of the best possible one.

The best order is known: if the cache holds the longest request, a depth-first walk of the tree of all prompts computes
every distinct prefix once (Zheng et al., 2024, theorem 3.1), and no order computes less. On small cases the bound is
checked against all permutations.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from random import Random

from benchmarks.small_engines import limits, memory, simulated
from quire.planner.reproduce.reuse import best_hits
from quire.planner.workloads import Session, Turn
from quire.scheduler.queue.prefix_aware import score

POLICIES = ("fcfs", "lpm", "cache-aware")  # the other policies equal fcfs with one tenant and one class
FIRST_TOKEN = 16


@dataclass(frozen=True, slots=True)
class Hits:
    """Tokens of all prompts, how many of them had a prefix match, and the virtual seconds until all requests ended."""

    num_tokens: int
    num_found: int
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Hit rate, 0 to 1."""
        return self.num_found / self.num_tokens


def best(prompts: Sequence[Sequence[int]]) -> Hits:
    """The upper bound: each distinct prefix is computed once, and always the last token of each prompt."""
    return Hits(sum(map(len, prompts)), best_hits(prompts))


def served(
    prompts: Sequence[Sequence[int]],
    policy: str,
    *,
    num_blocks: int,
    block_size: int,
    num_output_tokens: int = 1,
    rate: float | None = None,
    wait_weight: float = 1.0,
    **changed: object,
) -> Hits:
    """Prefix matches of the scheduler if the prompts arrive at once, or `rate` per second."""
    longest = max(map(len, prompts)) + num_output_tokens
    config = limits(policy, max_model_len=longest, wait_weight=wait_weight, **changed)
    simulation = simulated(config, memory(num_blocks, block_size), 5e-3, 5e-5)
    simulation.run(
        [Session(i / rate if rate else 0.0, (Turn((prompt,), num_output_tokens),)) for i, prompt in enumerate(prompts)]
    )
    accounts = simulation.engines[0].scheduler.request_stats
    return Hits(accounts.num_query_tokens, accounts.num_hit_tokens, simulation.engines[0].clock.now)


def best_of_all_orders(prompts: Sequence[Sequence[int]], *, num_blocks: int, block_size: int) -> Hits:
    """The best result of all permutations, with one request running at a time."""
    return max(
        (
            served(order, "fcfs", num_blocks=num_blocks, block_size=block_size, max_num_seqs=1)
            for order in permutations(prompts)
        ),
        key=lambda hits: hits.num_found,
    )


def few_shot(rng: Random, num_subjects: int, num_questions: int) -> list[list[int]]:
    """Prompts like MMLU: an instruction, five examples per subject, a question; subjects are shuffled."""

    def tokens(count: int) -> list[int]:
        return [rng.randrange(FIRST_TOKEN, 32000) for _ in range(count)]

    instruction = tokens(23)
    prompts = []
    for _ in range(num_subjects):
        examples = instruction + tokens(rng.randrange(400, 700))
        prompts += [examples + tokens(rng.randrange(30, 90)) for _ in range(num_questions)]
    rng.shuffle(prompts)
    return prompts


def thoughts(rng: Random, num_problems: int, width: int, depth: int) -> list[list[int]]:
    """Prompts like tree-of-thought: every node below the root of each problem's tree of partial solutions."""

    def tokens(count: int) -> list[int]:
        return [rng.randrange(FIRST_TOKEN, 32000) for _ in range(count)]

    system = tokens(155)
    prompts = []
    for _ in range(num_problems):
        live = [system + tokens(90)]
        for _ in range(depth):
            live = [stem + tokens(rng.randrange(30, 60)) for stem in live for _ in range(width)]
            prompts += live
    rng.shuffle(prompts)
    return prompts


def small_case(rng: Random, num_prompts: int, block_size: int) -> list[list[int]]:
    """A few prompts of one to three blocks, drawn from three blocks, so that prefixes are shared by chance."""
    blocks = [[rng.randrange(10_000) for _ in range(block_size)] for _ in range(3)]
    prompts = []
    for _ in range(num_prompts):
        stem = [token for _ in range(rng.randrange(1, 4)) for token in rng.choice(blocks)]
        prompts.append([*stem, rng.randrange(10_000)])
    return prompts


def order(*, quick: bool = False) -> dict[str, object]:
    """The share of the best hit rate, and the virtual time, by workload, pool size and policy."""
    sizes = (6, 10, 4) if quick else (57, 20, 24)
    rows: dict[str, object] = {}
    for seed in range(1 if quick else 3):
        rng = Random(f"order-{seed}")
        workloads = {"few-shot": few_shot(rng, *sizes[:2]), "thoughts": thoughts(rng, sizes[2], 3, 3)}
        for name, prompts in workloads.items():
            bound = best(prompts)
            for rate, num_blocks in ((None, 1024), (None, 256), (60.0, 1024)):
                for policy in POLICIES:
                    hits = served(
                        prompts,
                        policy,
                        num_blocks=num_blocks,
                        block_size=16,
                        num_output_tokens=16,
                        rate=rate,
                        max_num_seqs=16,
                    )
                    arriving = "all at once" if rate is None else f"{rate:.0f}/s"
                    rows[f"{name}, {arriving}, {num_blocks} blocks, {policy}, seed {seed}"] = {
                        "hit_rate": hits.rate,
                        "best": bound.rate,
                        "share": hits.rate / bound.rate,
                        "seconds": hits.seconds,
                    }
    return rows


def crossover(matched: tuple[int, int], waited: tuple[float, float]) -> float:
    """The `wait_weight`, in tokens per second, at which two requests change places (math entry 4)."""
    weight = (matched[0] - matched[1]) / (waited[1] - waited[0])
    assert abs(score(matched[0], waited[0], weight) - score(matched[1], waited[1], weight)) < 1e-6 * matched[0]
    return weight
