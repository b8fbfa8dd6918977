"""The fields of a body that say how sequences are compared and searched. Knows names and values, no route."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import BeforeValidator, JsonValue
from pydantic_core import PydanticCustomError

from quire.core.request import Beams
from quire.errors import RequestError
from quire.params import BeamSearchParams, SamplingParams
from quire.scheduler.beam_search import plan_beams
from quire.server.api.request_params import Body, about, is_same
from quire.server.errors import renamed

# What a beam search has no use for -> the values that ask for nothing. Null is one of them for every field.
_NEUTRAL: Mapping[str, tuple[JsonValue, ...]] = MappingProxyType(
    {
        **{"temperature": (0, 1), "top_p": (1,), "top_k": (0, -1), "min_p": (0,), "deterministic": (False,)},
        **{"presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,)},
        **{"logit_bias": ({},), "allowed_token_ids": (), "bad_words": ([],), "stop": ([],)},
        **{"seed": (), "stream": (False,), "logprobs": (False,), "logprob_token_ids": ([],), "prompt_logprobs": ()},
    }
)


def _one_of_three(value: object) -> object:
    if not isinstance(value, bool) and value != "never":
        raise PydanticCustomError("early_stopping", "must be true, false or 'never'")
    return value


Stopping = Annotated[bool | Literal["never"], BeforeValidator(_one_of_three)]


class SearchBody(Body):
    """The part of a body that says how the best sequences are found."""

    best_of: int | None = about("Completions: generate so many for each prompt, and return the n best (n to 128).")
    use_beam_search: bool | None = about("Search for the most likely sequences in place of sampling.")
    length_penalty: float | None = about(
        "Of a beam search: above 0 it favours long sequences (-10 to 10); 1 by default."
    )
    early_stopping: Stopping | None = about("Of a beam search: whether to end it before it is certain.")

    def searched(self, params: SamplingParams) -> SamplingParams:
        """`params` as they are for a beam search, where one is asked for.

        Raises RequestError for a field that has no meaning beside the others.
        """
        if not self.use_beam_search:
            for name, neutral in (("length_penalty", 1), ("early_stopping", False)):
                if getattr(self, name) not in (None, neutral):
                    raise RequestError(f"{name} needs use_beam_search to be true", name)
            return params
        for name, values in _NEUTRAL.items():
            given = getattr(self, name, None)
            if given is not None and not any(is_same(given, value) for value in values):
                raise RequestError(f"{name} does not go with use_beam_search; leave it out", name)
        return replace(params, best_of=None, temperature=0.0)

    def search_names(self) -> Mapping[str, str]:
        """What the engine calls a beam search's width -> the field that says it here."""
        return {"beam_width": "n" if self.best_of is None else "best_of"} if self.use_beam_search else {}

    def beams(self, params: SamplingParams, *, vocab_size: int, num_end_tokens: int) -> Beams | None:
        """The beam search that is asked for, as wide as best_of or n. Raises RequestError."""
        if not self.use_beam_search:
            return None
        with renamed(self.search_names()):
            search = BeamSearchParams(
                beam_width=self.best_of or params.n,
                max_tokens=params.max_tokens,
                ignore_eos=params.ignore_eos,
                length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
                early_stopping=self.early_stopping or False,
            )
            num_stop_ids = len(params.stop_token_ids)
            return plan_beams(search, vocab_size=vocab_size, num_end_tokens=num_end_tokens, num_stop_ids=num_stop_ids)
