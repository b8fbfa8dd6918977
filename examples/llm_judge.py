"""A judge: answers are graded on several dimensions side by side, and the grades are the model's own likelihoods.

python examples/llm_judge.py [--url http://localhost:8000]
"""

import argparse

import quire.lang as sgl

DIMENSIONS = {
    "price": "How much is the {item}?",
    "place": "Which shelf holds the {item}?",
    "keeper": "Who keeps the {item}?",
}


@sgl.function
def judge(s, item, claims):
    s += sgl.user("Who are you?")
    s += sgl.assistant(sgl.gen("judge", max_tokens=32))
    forks = s.fork(len(DIMENSIONS))
    for fork, (dimension, question) in zip(forks, DIMENSIONS.items(), strict=True):
        fork += sgl.user(question.format(item=item))
        fork += sgl.assistant(sgl.select("verdict", [claims[person][dimension] for person in claims]))
    forks.join()
    points = {
        person: sum(claim[dimension] == verdict for dimension, verdict in zip(DIMENSIONS, s["verdict"], strict=True))
        for person, claim in claims.items()
    }
    s["best"] = max(points, key=points.get)
    return points


CLAIMS = {
    "Ann": {
        "price": "The hammer costs 12 coins a day.",
        "place": "The hammer is on shelf F3.",
        "keeper": "Igor keeps the hammer.",
    },
    "Bob": {
        "price": "The hammer costs 47 coins a day.",
        "place": "The hammer is on shelf A1.",
        "keeper": "Faye keeps the hammer.",
    },
}


def main(backend):
    state = judge.run("hammer", CLAIMS, temperature=0, backend=backend)
    print(state["verdict"])
    print(state.ret_value, "best:", state["best"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="of a server; without it, the model runs in this process")
    url = parser.parse_args().url
    with sgl.RuntimeEndpoint(url) if url else sgl.Engine() as backend:
        main(backend)
