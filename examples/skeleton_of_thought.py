"""Skeleton of thought: first the points of an answer, then all of them are written out side by side.

python examples/skeleton_of_thought.py [--url http://localhost:8000]
"""

import argparse

import quire.lang as sgl


@sgl.function
def report(s, items):
    s += sgl.user("Sort: " + " ".join(items))
    s += sgl.assistant(sgl.gen("skeleton", max_tokens=24))
    points = s["skeleton"].split()
    forks = s.fork(len(points))
    for fork, point in zip(forks, points, strict=True):
        for name, question in (("price", "How much is the {}?"), ("color", "What color is the {}?")):
            fork += sgl.user(question.format(point))
            fork += sgl.assistant(sgl.gen(name, max_tokens=16))
    forks.join()
    lines = [f"{i}. {price} {color}" for i, (price, color) in enumerate(zip(s["price"], s["color"], strict=True), 1)]
    s["report"] = "\n".join(lines)


def main(backend):
    state = report.run(["rope", "hammer", "lantern"], temperature=0, backend=backend)
    print(state["skeleton"])
    print(state["report"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="of a server; without it, the model runs in this process")
    url = parser.parse_args().url
    with sgl.RuntimeEndpoint(url) if url else sgl.Engine() as backend:
        main(backend)
