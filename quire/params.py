"""SamplingParams: what a caller may ask of one request. Names as in vLLM, every value bounded."""

from dataclasses import dataclass

from quire.errors import RequestError, known_arguments_only

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024  # characters
MAX_TOKENS = 2**31 - 1
MAX_TEMPERATURE = 100.0


@known_arguments_only(RequestError)
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when a sequence ends.

    temperature: 0 is greedy. top_k: 0 or -1 keeps all. max_tokens: None is "up to max_model_len".
    seed: None lets the engine draw one at admission. stop: strings, not part of the text returned.
    logprobs: how many alternatives to report beside each sampled token.
    Raises RequestError for a value out of bounds and for an unknown name, with the nearest known one.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            one = str if name == "stop" else int
            items = () if value is None else (value,) if isinstance(value, one) else value
            if not isinstance(items, list | tuple):
                raise RequestError(f"{name} must be a list, not {type(value).__name__}", name)
            object.__setattr__(self, name, tuple(items))
        _check_number("n", self.n, int, 1, MAX_N)
        _check_number("temperature", self.temperature, float, 0, MAX_TEMPERATURE)
        _check_number("top_p", self.top_p, float, 0, 1)
        if self.top_p == 0:
            raise RequestError("top_p must be above 0; use temperature=0 for greedy sampling", "top_p")
        _check_number("top_k", self.top_k, int, -1, MAX_TOKENS)
        _check_number("min_p", self.min_p, float, 0, 1)
        _check_number("seed", self.seed, int, -(2**63), 2**64 - 1, optional=True)
        _check_number("max_tokens", self.max_tokens, int, 1, MAX_TOKENS, optional=True)
        _check_number("min_tokens", self.min_tokens, int, 0, MAX_TOKENS)
        _check_number("logprobs", self.logprobs, int, 0, MAX_LOGPROBS, optional=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})", "min_tokens")
        if not isinstance(self.ignore_eos, bool):
            raise RequestError("ignore_eos must be true or false", "ignore_eos")
        self._check_stops()

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOPS or len(self.stop_token_ids) > MAX_STOPS:
            raise RequestError(f"at most {MAX_STOPS} stop strings and stop_token_ids", "stop")
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_LENGTH or not is_unicode(text):
                raise RequestError(f"a stop string must have 1 to {MAX_STOP_LENGTH} valid Unicode characters", "stop")
        for token in self.stop_token_ids:
            _check_number("stop_token_ids", token, int, 0, MAX_TOKENS)


def is_unicode(text: str) -> bool:
    """Whether a text can be written down; one with lone surrogates cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_number(
    name: str, value: object, kind: type[int] | type[float], low: float, high: float, *, optional: bool = False
) -> None:
    if value is None and optional:
        return
    allowed = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed):
        raise RequestError(f"{name} must be a{'n integer' if kind is int else ' number'}, not {value!r:.80}", name)
    if not low <= value <= high:  # also refuses NaN
        raise RequestError(f"{name} must be between {low:g} and {high:g}, not {value!r:.80}", name)
