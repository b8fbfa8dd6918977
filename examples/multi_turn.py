"""A conversation of several turns, told while it is written.

python examples/multi_turn.py [--url http://localhost:8000]
"""

import argparse

import quire.lang as sgl


@sgl.function
def multi_turn(s, first, second):
    s += sgl.user(first)
    s += sgl.assistant(sgl.gen("first_answer", max_tokens=24))
    s += sgl.user(second)
    with s.assistant():
        s += sgl.gen("second_answer", max_tokens=24)


def main(backend):
    questions = {"first": "How much is the compass?", "second": "Who keeps it?"}
    state = multi_turn.run(**questions, temperature=0, stream=True, backend=backend)
    for text in state.text_iter():
        print(text, end="", flush=True)
    for message in state.messages():
        print(f"{message['role']:>9}: {message['content']}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="of a server; without it, the model runs in this process")
    url = parser.parse_args().url
    with sgl.RuntimeEndpoint(url) if url else sgl.Engine() as backend:
        main(backend)
