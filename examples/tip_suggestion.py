"""Tips from several branches: fork, one question each, join, and go on with what they found.

python examples/tip_suggestion.py [--url http://localhost:8000]
"""

import argparse
import re

import quire.lang as sgl


@sgl.function
def tip_suggestion(s, items):
    s += sgl.user("What can you do?")
    s += sgl.assistant(sgl.gen("greeting", max_tokens=60))
    forks = s.fork(len(items))  # all of them go on from the same text, whose KV they share
    for fork, item in zip(forks, items, strict=True):
        fork += sgl.user(f"How much is the {item}?")
        fork += sgl.assistant(sgl.gen("price", max_tokens=16))
        fork += sgl.user("Which shelf holds it?")
        fork += sgl.assistant(sgl.gen("shelf", max_tokens=16))
    forks.join()  # what the forks call "price" and "shelf" are lists now
    prices = [found[0] for price in s["price"] if (found := re.search(r"\d+", price))]  # a small model may name none
    s += sgl.user(f"{'+'.join(prices)}=?")
    s += sgl.assistant(sgl.gen("sum", max_tokens=40))


def main(backend):
    state = tip_suggestion.run(["lantern", "rope"], temperature=0, backend=backend)
    for price, shelf in zip(state["price"], state["shelf"], strict=True):
        print(f"Tip: {price} {shelf}")
    print(f"Both together: {state['sum']}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="of a server; without it, the model runs in this process")
    url = parser.parse_args().url
    with sgl.RuntimeEndpoint(url) if url else sgl.Engine() as backend:
        main(backend)
