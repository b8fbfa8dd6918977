"""Rows M10, M11, M12 and M17: memory that sequences save by sharing blocks."""

from collections.abc import Sequence
from random import Random

from benchmarks.prefix.rigs import BLOCK_SIZE, Embedded, Rig, ask, cache_config, greedy, num_held, scripted
from benchmarks.prefix.rows import Note, Row, Section
from benchmarks.workloads import FIRST_TOKEN, Query
from quire.cache.kv_cache import KVCache
from quire.config import PrefixIndexKind
from quire.core.request import Request
from quire.params import BeamSearchParams
from quire.planner.lengths import capped_median
from quire.scheduler.beam_search import plan_beams
from tools.demo_model.stories import tell

WIDTHS = (2, 4, 6)
_INDEXES: tuple[PrefixIndexKind, ...] = ("radix", "hash")
ALPACA_INPUT_MEAN = 19.3  # tokens; PagedAttention (Kwon et al., SOSP 2023), section 6.1, figure 11
ALPACA_OUTPUT_MEAN = 58.4
ALPACA_INPUT_SPREAD = 0.5  # sigma of the logarithm; instructions are short. Both spreads are our assumption
ALPACA_OUTPUT_SPREAD = 0.9  # as for ShareGPT in benchmarks.workloads
ALPACA_LONGEST = 512

BYTES_PER_TOKEN = 327_680  # Llama-2-70B, GQA-8, fp16: row M4
BEAM_BYTES = 8.1e9  # one beam without sharing in M17: 32.4 GB / 4 = 64.8 GB / 8 = 129.6 GB / 16

LENGTHS = (
    f"lengths: lognormal with the paper's means, {ALPACA_INPUT_MEAN} in (sigma {ALPACA_INPUT_SPREAD}) and "
    f"{ALPACA_OUTPUT_MEAN} out (sigma {ALPACA_OUTPUT_SPREAD}), capped at {ALPACA_LONGEST}; the sigmas are ours. "
    "Mean over steps of 1 - blocks held / blocks without sharing, prefix index off, so that only what a request's own "
    "sequences share counts. "
)
RANGE = "The document gives its range for width 6; in the paper the range is over all widths. "


def alpaca_lengths(n: int, seed: int) -> list[tuple[int, int]]:
    """Pairs (prompt tokens, output tokens) without the data set: the paper's means, distributions of our choice."""
    rng = Random(f"alpaca-{seed}")
    sides = (
        (capped_median(ALPACA_INPUT_MEAN, ALPACA_INPUT_SPREAD, ALPACA_LONGEST), ALPACA_INPUT_SPREAD),
        (capped_median(ALPACA_OUTPUT_MEAN, ALPACA_OUTPUT_SPREAD, ALPACA_LONGEST), ALPACA_OUTPUT_SPREAD),
    )
    pairs = [
        [max(1, min(ALPACA_LONGEST, round(median * rng.lognormvariate(0, spread)))) for median, spread in sides]
        for _ in range(n)
    ]
    return [(num_prompt, num_output) for num_prompt, num_output in pairs]


def saved(held: Sequence[tuple[int, int]]) -> float:
    """Percent of blocks saved, averaged over steps. held: per step, blocks without sharing and with sharing."""
    shares = [1 - own / unshared for unshared, own in held if unshared]
    return 100 * sum(shares) / len(shares)


def _random_queries(n: int) -> list[Query]:
    rng = Random(0)
    return [
        Query([rng.randrange(FIRST_TOKEN, 1000) for _ in range(num_prompt)], num_output)
        for num_prompt, num_output in alpaca_lengths(n, seed=0)
    ]


def _saved_by(rig: Rig, queries: Sequence[Query], width: int, *, search: bool) -> float:
    params = BeamSearchParams(beam_width=width, max_tokens=None, early_stopping="never")
    vocab_size, num_ends = rig.engine.vocab_size, rig.engine.num_end_tokens
    beams = plan_beams(params, vocab_size=vocab_size, num_end_tokens=num_ends) if search else None
    rig.scheduler.watching = True
    ask(rig.engine, queries, n=width, beams=beams)
    return saved(rig.scheduler.held)


def parallel_sampling(note: Note, *, quick: bool) -> Section:
    """M10: n samples of one prompt share its full blocks."""
    section, queries = Section(), _random_queries(16 if quick else 200)
    curve = section.data["saved_percent"] = {}
    said = (
        LENGTHS + RANGE + "What is shared depends on lengths alone, so that a model would change nothing. Of a prompt "
        "of 19 tokens one block of 16 is shared or none: the result hangs on the shape of the lengths, which the "
        "document does not give; that would explain a figure outside its range, and does not make it a match."
    )
    for n in WIDTHS:
        note(f"M10: {n} samples of each of {len(queries)} prompts")
        curve[n] = _saved_by(scripted("none"), queries, n, search=False)
        row = Row("M10", f"saved by sharing the prompt, n={n}", "simulated", curve[n], "%", (6.1, 9.8), note=said)
        section.rows.append(row)
    return section


def beam_search(note: Note, *, quick: bool) -> Section:
    """M11: beams share blocks by copy-on-write, with scripted logprobs and with the embedded model's."""
    section, queries = Section(), _random_queries(8 if quick else 100)
    section.data = {"simulated_percent": {}, "measured_percent": {}}
    for width in WIDTHS:
        note(f"M11: beams of width {width} over the scripted runner, {len(queries)} prompts")
        percent = section.data["simulated_percent"][width] = _saved_by(scripted("none"), queries, width, search=True)
        said = (
            LENGTHS + RANGE + "The scripted runner's logprobs are hashes, without regard to what a beam says: how "
            "early beams part is its hash's doing, not a language's; outside the range this says nothing against it."
        )
        what = f"saved by copy-on-write, width {width}, scripted"
        section.rows.append(Row("M11", what, "simulated", percent, "%", (37.6, 55.2), note=said))
    embedded = Embedded()
    stories = _story_queries(embedded, 2 if quick else 24)
    for width in WIDTHS:
        note(f"M11: beams of width {width} over the embedded model, {len(stories)} stories")
        percent = section.data["measured_percent"][width] = _saved_by(embedded.rig("none"), stories, width, search=True)
        said = (
            "Measured: the same lengths, prompts are beginnings of stories that the embedded model (3.3 M parameters) "
            "was trained on. How early beams part is a property of the model."
        )
        what = f"saved by copy-on-write, width {width}, embedded model"
        section.rows.append(Row("M11", what, "measured", percent, "%", (37.6, 55.2), note=said))
    return section


def _story_queries(embedded: Embedded, n: int) -> list[Query]:
    rng, queries = Random(1), []
    for num_prompt, num_output in alpaca_lengths(n, seed=1):
        tokens: list[int] = []
        while len(tokens) < num_prompt:
            tokens += embedded.tokenizer.encode(tell(rng).whole + "\n")
        queries.append(Query(tokens[:num_prompt], num_output))
    return queries


def shared_prefix(note: Note, *, quick: bool) -> Section:
    """M12: 100 requests share a prefix of 1000 tokens."""
    del quick  # it takes a second
    section, num_requests, length = Section(), 100, 1000
    note("M12: 100 requests with a prefix of 1000 tokens")
    forked = KVCache(cache_config("none", 1000))
    first = forked.new_table(0)
    forked.grow(first, length)
    for i in range(1, num_requests):
        forked.fork(0, i, length)
    unshared, own = num_held(forked)
    before = 100 * (1 - own / unshared)
    section.rows.append(Row("M12", "prefix blocks of a copy", "simulated", unshared / num_requests, "blocks", (63, 63)))
    said = "Exactly the document's count: all 100 read the 63 blocks, and nobody has written behind them yet."
    what = "prefix blocks saved, before anybody writes"
    section.rows.append(Row("M12", what, "simulated", before, "%", (99.0, 99.0), note=said))
    for index in _INDEXES:
        percent, computed = _with_questions(index, num_requests, length)
        said = (
            "The last of the 63 blocks holds 8 tokens of the prefix and the first 8 of the request's own, so each "
            "request needs one of its own: 62 + 100 blocks in place of 6300. The document counts it as shared. "
            "The tree copies those 8 tokens' KV, a hash index computes it again."
        )
        what = f"prefix blocks saved, requests going on differently, {index}"
        section.rows.append(Row("M12", what, "simulated", percent, "%", (99.0, 99.0), note=said))
        what = f"prefix tokens not computed, {index}"
        section.rows.append(Row("M12", what, "simulated", computed, "%", note=said))
    section.data = {"before_writes": before, "rows": len(section.rows)}
    return section


def _with_questions(index: PrefixIndexKind, num_requests: int, length: int) -> tuple[float, float]:
    """Percent of prefix blocks saved, and of prefix tokens not computed, for requests that run at once."""
    rig, rng = scripted(index, max_num_seqs=num_requests), Random(2)
    prefix = [rng.randrange(1000) for _ in range(length)]
    queries = [Query([*prefix, i, *(rng.randrange(1000) for _ in range(20))], 8) for i in range(num_requests)]
    engine, cached = rig.engine, dict[str, int]()
    for i, query in enumerate(queries):
        engine.add(Request(str(i), query.prompt, greedy(query.num_output_tokens)))
        if i == 0:
            engine.step()  # the others arrive after the first step
    num_blocks, most = -(-length // BLOCK_SIZE), (0, 0)
    while engine.has_work:
        cached |= {output.request_id: output.num_cached_tokens for output in engine.step()}
        tables = [table.blocks[0][:num_blocks] for table in rig.cache.tables.values()]
        held = sum(map(len, tables)), len({block for blocks in tables for block in blocks})
        most = max(most, held)
    reused = sum(min(cached[str(i)], length) for i in range(num_requests))
    return 100 * (1 - most[1] / most[0]), 100 * reused / (num_requests * length)


def wide_beams(note: Note, *, quick: bool) -> Section:
    """M17: beams of long sequences at 320 KiB per token, with real block tables, forked at the end of the prompt."""
    del quick  # it takes a second
    section = Section()
    length = round(BEAM_BYTES / BYTES_PER_TOKEN)
    prompt = _prompt_of(width=4, with_sharing=12.8e9)
    assumed = (
        f"The document states no lengths. Its memory without sharing is {BEAM_BYTES / 1e9} GB a beam at every width, "
        f"{length} tokens at {BYTES_PER_TOKEN} bytes; how much of that is prompt is not said. Width 4's 12.8 GB mean "
        f"{prompt} tokens of prompt if beams share that and nothing behind it: this one row is how that number was "
        "found, so that it proves nothing; widths 8 and 16 follow from it. The document's own figures for them would "
        f"need {_prompt_of(8, 18.2e9)} and {_prompt_of(16, 28.4e9)} tokens: its three rows have no one prompt, or its "
        "beams share more behind it the more there are."
    )
    for width, (without, shared) in {4: (32.4, 12.8), 8: (64.8, 18.2), 16: (129.6, 28.4)}.items():
        note(f"M17: {width} beams of {length} tokens")
        unshared, own = (blocks * BLOCK_SIZE * BYTES_PER_TOKEN / 1e9 for blocks in _beams(width, prompt, length))
        section.data[str(width)] = {"without_gb": unshared, "with_gb": own}
        what = f"memory of {width} beams"
        fitted = width == 4  # nothing to compare: the lengths were found from these two figures
        for kind, ours, stated in (("no sharing", unshared, without), ("copy-on-write", own, shared)):
            reported = None if fitted else (stated, stated)
            section.rows.append(Row("M17", f"{what}, {kind}", "simulated", ours, "GB", reported, note=assumed))
    for what, width, prompt, unit, stated in (
        ("512 tokens shared by 4 beams, without sharing", 4, 512, "MiB", 640.0),
        ("512 tokens shared by 4 beams, with", 4, 512, "MiB", 160.0),
        ("1024 tokens shared by 8 beams: saved", 8, 1024, "GiB", 2.19),
    ):
        unshared, own = (blocks * BLOCK_SIZE * BYTES_PER_TOKEN for blocks in _beams(width, prompt, prompt))
        value = {640.0: unshared / 2**20, 160.0: own / 2**20, 2.19: (unshared - own) / 2**30}[stated]
        said = "The worked examples in the document's text state their lengths; it writes MB and GB for MiB and GiB."
        section.rows.append(Row("M17", what, "simulated", value, unit, (stated, stated), note=said))
    return section


def _prompt_of(width: int, with_sharing: float) -> int:
    """Prompt tokens for which `width` beams that share only the prompt need `with_sharing` bytes."""
    return round((width * BEAM_BYTES - with_sharing) / (width - 1) / BYTES_PER_TOKEN)


def _beams(width: int, prompt: int, length: int) -> tuple[int, int]:
    """Blocks without and with sharing, of beams that fork at the end of the prompt and have `length` tokens."""
    cache = KVCache(cache_config("none", width * (length // BLOCK_SIZE + 2), BLOCK_SIZE * BYTES_PER_TOKEN))
    first = cache.new_table(0)
    cache.grow(first, prompt)
    for i in range(1, width):
        cache.fork(0, i, prompt)
    for table in cache.tables.values():
        cache.grow(table, length)
    return num_held(cache)
