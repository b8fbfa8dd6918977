"""Answers that are JSON whatever the model would like to write: by a schema, and by a regular expression.

python examples/json_decode.py [--url http://localhost:8000]
"""

import argparse
import json

import quire.lang as sgl

SCHEMA = {
    "type": "object",
    "properties": {
        "count": {"type": "integer"},
        "color": {"enum": ["red", "white", "green", "black"]},
        "day": {"type": "string"},
        "name": {"type": "string"},
    },
    "required": ["count", "color", "day", "name"],
    "additionalProperties": False,
}
REGEX = r'\{"item": "[a-z]+", "count": [0-9]{1,2}, "name": "[A-Z][a-z]+"\}'


@sgl.function
def by_schema(s, sentence):
    s += sgl.user(f"{sentence}\nJSON keys: count, color, day, name")
    s += sgl.assistant(sgl.gen("record", max_tokens=60, json_schema=SCHEMA))


@sgl.function
def by_regex(s, sentence):
    s += sgl.user(f"{sentence}\nJSON keys: item, count, name")
    s += sgl.assistant(sgl.gen("record", max_tokens=60, regex=REGEX))


def main(backend):
    sentences = [
        {"sentence": "Faye took 18 white ladders on Thursday."},
        {"sentence": "Omar took 5 red tents on Monday."},
    ]
    for program in (by_schema, by_regex):
        for state in program.run_batch(sentences, temperature=0, backend=backend):
            print(json.loads(state["record"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="of a server; without it, the model runs in this process")
    url = parser.parse_args().url
    with sgl.RuntimeEndpoint(url) if url else sgl.Engine() as backend:
        main(backend)
