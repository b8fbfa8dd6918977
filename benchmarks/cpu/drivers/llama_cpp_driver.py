"""Driver for llama.cpp through its C interface. All queries share one context, like the slots of its server.

The model is a GGUF file. Each pass computes up to 2048 tokens: one of every decoding sequence, then prompt tokens.
Common prefixes are computed once per query.

With the option `lookup`, a single query gets so many drafts a step from the package's prompt lookup. The tokens up to
the first wrong draft are kept.
"""

import os
from dataclasses import dataclass, field

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from protocol import Driven, Queries, drive

TOKENS_AT_ONCE = 2048


@dataclass
class Sequence:
    """A running query. tokens: tokens whose KV is not computed."""

    slot: int
    tokens: list[int]
    num_left: int  # output tokens left to generate
    num_computed: int = 0
    num_out: int = 0
    text: list[int] = field(default_factory=list)  # of prompt and output


class Model:
    """A loaded model with `max_num_seqs` slots."""

    def __init__(self, settings: dict, threads: int) -> None:
        llama_cpp.llama_log_set(_quiet, None)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            settings["gguf"].encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = settings["max_num_seqs"]
        params.n_ctx = 32768  # shared by all sequences
        params.kv_unified = True
        params.n_batch, params.n_ubatch = TOKENS_AT_ONCE, 512
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        assert self._model and self._context
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(TOKENS_AT_ONCE, 0, 1)
        lookup = settings["options"].get("lookup", 0)
        self._lookup = LlamaPromptLookupDecoding(num_pred_tokens=lookup) if lookup else None
        self.num_steps = 0

    def run(self, queries: Queries) -> list[int]:
        """Run all queries at once. There may not be more queries than slots."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)  # noqa: FBT003
        sequences = [
            Sequence(slot, query["prompt"], query["out"], text=[*query["prompt"]]) for slot, query in enumerate(queries)
        ]
        while left := [sequence for sequence in sequences if sequence.num_left]:
            self._step(left)
        return [sequence.num_out for sequence in sequences]

    def _step(self, sequences: list[Sequence]) -> None:
        batch, count, ends = self._batch, 0, []
        for number, sequence in enumerate(sequences):
            some = sequence.tokens[: TOKENS_AT_ONCE - count - (len(sequences) - number - 1)]
            drafts = self._drafts(sequence) if len(sequences) == 1 else []
            for place, token in enumerate((*some, *drafts)):
                at = count + place
                batch.token[at], batch.pos[at] = token, sequence.num_computed + place
                batch.n_seq_id[at], batch.seq_id[at][0], batch.logits[at] = 1, sequence.slot, place >= len(some)
            count += len(some)
            sequence.num_computed += len(some)
            sequence.tokens = sequence.tokens[len(some) :]
            if not sequence.tokens:
                batch.logits[count - 1] = 1
                ends.append((sequence, count - 1, drafts))
            count += len(drafts)
        batch.n_tokens = count
        status = llama_cpp.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode gave {status}")
        self.num_steps += 1
        for sequence, index, drafts in ends:
            self._keep(sequence, index, drafts)

    def _drafts(self, sequence: Sequence) -> list[int]:
        if self._lookup is None or not sequence.num_out:
            return []
        return self._lookup(np.array(sequence.text, np.intc)).tolist()[: sequence.num_left - 1]

    def _keep(self, sequence: Sequence, index: int, drafts: list[int]) -> None:
        """Append the most likely tokens from the logits at `index` on, up to the first that is not its draft."""
        new: list[int] = []
        while len(new) <= len(drafts) and new == drafts[: len(new)]:
            logits = llama_cpp.llama_get_logits_ith(self._context, index + len(new))
            new.append(int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax()))
        sequence.num_computed += len(new) - 1
        if len(new) <= len(drafts):
            memory = llama_cpp.llama_get_memory(self._context)
            llama_cpp.llama_memory_seq_rm(memory, sequence.slot, sequence.num_computed, -1)
        sequence.tokens = new[-1:]
        sequence.text += new
        sequence.num_out += len(new)
        sequence.num_left -= len(new)


@llama_cpp.llama_log_callback
def _quiet(level: int, text: bytes, data: object) -> None:
    del level, text, data


def load(settings: dict) -> Driven:
    """Load the model with one thread per core."""
    threads = len(os.sched_getaffinity(0))
    model = Model(settings, threads)
    notes = [f"from GGUF, {settings['gguf_type']}"]
    return Driven(model.run, llama_cpp.__version__, threads, notes, lambda: model.num_steps)


if __name__ == "__main__":
    drive(load)
