"""Self-consistency: several answers are drawn, each thinks for itself, and the one that most agree on is taken.

python examples/self_consistency.py [--url http://localhost:8000]
"""

import argparse
from collections import Counter

import quire.lang as sgl


@sgl.function
def count(s, what, words, size=8):
    s += sgl.user(f"Count {what} in: {words}")
    forks = s.fork(size)
    forks += lambda i: sgl.assistant(
        sgl.gen("thought", max_tokens=60, stop="so ", temperature=0.7, seed=i)
        + "so "
        + sgl.gen("answer", max_tokens=4, temperature=0)
    )
    forks.join()
    votes = Counter(s["answer"])
    s["final"] = votes.most_common(1)[0][0]
    return votes


def main(backend):
    state = count.run("sheep", "plum plum cow plum sheep sheep banana banana plum sheep sheep", backend=backend)
    print(dict(state.ret_value))
    print("The answer:", state["final"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="of a server; without it, the model runs in this process")
    url = parser.parse_args().url
    with sgl.RuntimeEndpoint(url) if url else sgl.Engine() as backend:
        main(backend)
