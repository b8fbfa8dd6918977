"""The mean negative logprob of texts by llama.cpp. Runs in an interpreter that has llama-cpp-python.

Standard input: {"gguf": path, "texts": [ids, ...]}. Standard output: a JSON list of numbers. A text is one sequence,
and its first token counts not.
"""

import json
import os
import sys

import llama_cpp
import numpy as np


def main() -> None:
    """Compute the texts one after another."""
    asked = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp prints
    longest = max(map(len, asked["texts"]))
    model = llama_cpp.Llama(asked["gguf"], n_ctx=longest, n_batch=512, logits_all=True, verbose=False)
    found = []
    for ids in asked["texts"]:
        model.reset()
        model.eval(ids)
        logits = np.array(model.scores[: len(ids) - 1], np.float64)
        top = logits.max(1, keepdims=True)
        logprobs = logits - top - np.log(np.exp(logits - top).sum(1, keepdims=True))
        found.append(float(-logprobs[np.arange(len(ids) - 1), ids[1:]].mean()))
    print(json.dumps(found), file=answers)


if __name__ == "__main__":
    main()
