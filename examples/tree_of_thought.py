"""A tree of thoughts: which of some numbers add up to a goal? Each step forks every thought and keeps the best ones.

python examples/tree_of_thought.py [--url http://localhost:8000]
"""

import argparse
import math
import re

import quire.lang as sgl

WIDTH = 2  # thoughts that are kept


def added(state):
    """What the model found: the last number of its sum, or infinity if it wrote none."""
    numbers = re.findall(r"\d+", state["sum"])
    return int(numbers[-1]) if numbers else math.inf


@sgl.function
def search(s, numbers, goal):
    thoughts = [(s, (number,), number) for number in numbers]
    while thoughts:
        found = [used for _, used, total in thoughts if total == goal]
        if found:
            return found[0]
        steps = []
        for state, used, total in thoughts:
            left = [number for number in numbers if number not in used]
            if not left:
                continue
            forks = state.fork(len(left))
            for fork, number in zip(forks, left, strict=True):
                fork += sgl.user(f"{total}+{number}=?")
                fork += sgl.assistant(sgl.gen("sum", max_tokens=40))
                steps.append((fork, (*used, number)))
        grown = [(fork, used, added(fork)) for fork, used in steps]  # reads wait; the forks ran side by side
        thoughts = sorted((one for one in grown if one[2] <= goal), key=lambda one: goal - one[2])[:WIDTH]


def main(backend):
    numbers, goal = [8, 15, 27, 31], 66
    used = search.run(numbers, goal, temperature=0, backend=backend).ret_value
    print(f"{' + '.join(map(str, used))} = {goal}" if used else f"the model found no sum of {goal}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="of a server; without it, the model runs in this process")
    url = parser.parse_args().url
    with sgl.RuntimeEndpoint(url) if url else sgl.Engine() as backend:
        main(backend)
