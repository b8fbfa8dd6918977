"""Requests whose logits must not depend on the batch, and the logits of a run."""

from model_runner_driver import GREEDY, Driver, RowParams

from quire.params import SamplingParams

NUM_TOKENS = 12

PARAMS_OF_ROWS = [
    SamplingParams(temperature=0.0, logprobs=5, deterministic=True),
    SamplingParams(temperature=1.1, seed=3, logprobs=2, top_p=0.9, deterministic=True),
    GREEDY,
    SamplingParams(temperature=0.7, seed=4, logprobs=3, frequency_penalty=0.5, deterministic=True),
    SamplingParams(temperature=1.0, seed=5, logprobs=1),
]

STRICT = [row for row, row_params in enumerate(PARAMS_OF_ROWS) if row_params.deterministic]


def record(model, prompts, params_of_rows, cuts, *, rows=None, late_by=None, **options):
    """Tokens and bits of logprobs of sequences that are prefilled in chunks of cuts[row] and then decode.

    late_by: row -> steps after which it joins.
    """
    driver = Driver(model, **options)
    rows = list(range(len(prompts))) if rows is None else rows
    late_by = late_by or {}
    known = {row: list(prompts[row]) for row in rows}
    outputs = {row: [] for row in rows}
    done = dict.fromkeys(rows, 0)
    step = 0
    while any(len(outputs[row]) < NUM_TOKENS for row in rows):
        going = [row for row in rows if late_by.get(row, 0) <= step and len(outputs[row]) < NUM_TOKENS]
        fresh = [row for row in going if late_by.get(row, 0) == step]
        chunks = []
        for row in going:
            stop = min(len(known[row]), done[row] + cuts[row])
            samples = stop == len(known[row])
            chunks.append((row, row, done[row], stop, 0, int(samples), int(samples)))
            done[row] = stop
        opens = [(row, RowParams(params_of_rows[row], len(prompts[row]))) for row in fresh]
        result = driver.run(chunks, opens=opens, tokens=[(row, 0, prompts[row]) for row in fresh])
        sampled = [chunk[0] for chunk, count in zip(chunks, result.counts, strict=True) if count]
        for place, (row, token) in enumerate(zip(sampled, result.tokens.tolist(), strict=True)):
            k = params_of_rows[row].logprobs
            values = b"" if k is None else result.logprobs.values[place, : 1 + k].tobytes()
            ids = () if k is None else tuple(result.logprobs.ids[place, : 1 + k].tolist())
            known[row].append(token)
            outputs[row].append((token, ids, values))
        step += 1
    return outputs
