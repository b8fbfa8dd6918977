"""Vectors of prompts: pooling of hidden states, and the modules of an embedding model behind it."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from uuid import uuid4

import numpy as np
import safetensors

from quire.core.adapter import Adapter
from quire.core.output import Output
from quire.core.request import NO_NAMESPACE, Namespace
from quire.core.scheduling_params import DEFAULT_SCHEDULING_PARAMS, SchedulingParams
from quire.core.step import Pooling
from quire.engine.inputs import Generation, Prompt, prompt_request_id
from quire.errors import ModelError, QuireError, RequestError, nearest
from quire.models.sentence_transformers import Dense, EmbeddingConfig, LayerNorm, Normalize

_POOLINGS: Mapping[str, Pooling] = MappingProxyType(
    {
        "last": Pooling.LAST,
        "mean": Pooling.MEAN,
        "cls": Pooling.CLS,
        "max": Pooling.MAX,
        "mean_sqrt_len": Pooling.MEAN_SQRT_LEN,
        "weightedmean": Pooling.WEIGHTED_MEAN,
    }
)
POOLINGS = tuple(_POOLINGS)
NO_PROMPT = ""  # a prompt_name that means no prompt, where the model has a default one
_EPSILON = 1e-5  # of layer norms


class EmbeddingFailed(QuireError):
    """The engine failed to compute a prompt."""


class EmbeddingDeadlineMissed(EmbeddingFailed):
    """A prompt was aborted because it could not meet its deadline any more."""


class PooledPrompt:
    """The pooled state of one prompt, accumulated over its chunks."""

    def __init__(self, request_id: str, prompt_token_ids: list[int], pooling: Pooling) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.finish_reason: str | None = None
        self.num_cached_tokens = 0
        self._pooling = pooling
        self._part: np.ndarray | None = None

    def accumulate(self, output: Output) -> None:
        """Add the output of a chunk."""
        if output.pooled is not None:
            self._part = self._pooling.combine(self._part, output.pooled.astype(np.float32))
        self.finish_reason = output.finish_reason
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)

    def state(self) -> np.ndarray:
        """float32 (hidden_size,), or logits (number of classes,): valid once the prompt is computed."""
        if self._part is None:
            return np.zeros(0, np.float32)
        return self._pooling.whole(self._part, len(self.prompt_token_ids)).astype(np.float32)


Rows = Callable[[np.ndarray], np.ndarray]  # float32 (num_rows, in_features) -> (num_rows, out_features)


class Embedder:
    """Makes the vectors of one model. The constructor reads the weights of its modules, and raises ModelError."""

    def __init__(self, config: EmbeddingConfig) -> None:
        self.config = config
        self._modules: list[Rows] = [_module(one) for one in config.modules]

    @property
    def is_cheap(self) -> bool:
        """Whether the vectors of a batch take no more time than the rest of its answer."""
        return not any(isinstance(one, Dense) for one in self.config.modules)

    def pooling(self, name: str | None) -> Pooling:
        """The pooling of this name, by default the model's. Raises RequestError for another name."""
        if name is None:
            return self.config.pooling
        if name not in _POOLINGS:
            raise RequestError(f"pooling must be one of {', '.join(_POOLINGS)}, not {name!r:.80}", "pooling")
        return _POOLINGS[name]

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raises RequestError for a size of vectors that the model's files do not allow."""
        size, shorter = self.config.size, self.config.dimensions
        if dimensions in (None, size) or (dimensions is not None and shorter is not None and dimensions in shorter):
            return
        if shorter is None:
            if not 1 <= (dimensions or 0) <= size:
                raise RequestError(f"dimensions must be from 1 to the model's {size}, not {dimensions}", "dimensions")
            return
        if shorter:
            allowed = ", ".join(map(str, sorted({*shorter, size})))
            raise RequestError(f"dimensions must be one of {allowed} for this model, not {dimensions}", "dimensions")
        raise RequestError(
            f"dimensions must be the model's {size}, not {dimensions}: its config.json has neither is_matryoshka nor "
            "matryoshka_dimensions, which say that its vectors can be shortened",
            "dimensions",
        )

    def texts(self, prompts: Sequence[Prompt], prompt_name: str | None = None) -> list[Prompt]:
        """The prompts as the model reads them: texts behind a prompt of the model, lowercased if it says so.

        prompt_name: of the prompt; None: the model's default, NO_PROMPT: none. Token ids stay as they are. Raises
        RequestError for a prompt that the model does not have, and for one in front of token ids.
        """
        known = self.config.prompts
        if prompt_name and prompt_name not in known:
            has = f"it has {', '.join(map(repr, known))}" if known else "it has none"
            raise RequestError(
                f"the model has no prompt {prompt_name!r:.80}{nearest(prompt_name, known)}; {has}", "prompt_name"
            )
        name = self.config.default_prompt if prompt_name is None else prompt_name
        prefix, found = known[name] if name else "", list(prompts)
        if not (prefix or self.config.lowercase):
            return found
        for place, prompt in enumerate(prompts):
            if isinstance(prompt, Mapping) and "prompt_token_ids" not in prompt:
                prompt = prompt.get("prompt", "")
            if isinstance(prompt, str):
                text = prefix + prompt
                found[place] = text.lower() if self.config.lowercase else text
            elif prompt_name:
                raise RequestError(
                    "prompt_name needs texts: a prompt cannot be put in front of token ids", "prompt_name"
                )
        return found

    def vectors(
        self, pooled: Sequence[PooledPrompt], *, normalize: bool | None = None, dimensions: int | None = None
    ) -> np.ndarray:
        """float32 (len(pooled), size): the vectors of computed prompts.

        normalize: to length 1; None: as the model says. dimensions: numbers that are kept, after `check_dimensions`.
        """
        if not pooled:
            return np.zeros((0, self.config.size), np.float32)
        rows = np.stack([one.state() for one in pooled])
        for module in self._modules:
            rows = module(rows)
        if dimensions is not None:
            rows = rows[:, :dimensions]
        return _normalized(rows) if (self.config.normalize if normalize is None else normalize) else rows

    def similarity(self, first: np.ndarray, second: np.ndarray) -> float:
        """The similarity of two vectors, by the model's function."""
        a, b = first.astype(np.float64), second.astype(np.float64)
        if self.config.similarity == "dot":
            return float(a @ b)
        if self.config.similarity == "euclidean":
            return -float(np.linalg.norm(a - b))
        if self.config.similarity == "manhattan":
            return -float(np.abs(a - b).sum())
        lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
        return max(-1.0, min(1.0, float(a @ b) / lengths)) if lengths else 0.0  # it may be off by a rounding error


def _normalized(rows: np.ndarray) -> np.ndarray:
    """The rows, scaled to length 1; a row of zeros stays."""
    scaled = np.empty_like(rows)
    for place, row in enumerate(rows):  # one by one, as float64 takes twice the memory
        length = np.linalg.norm(row.astype(np.float64))
        scaled[place] = row / length if length > 0 else row
    return scaled


_ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def _gelu(rows: np.ndarray) -> np.ndarray:
    """With the error function by formula 7.1.26 of Abramowitz and Stegun, which is off by less than 1.5e-7."""
    x = np.abs(rows.astype(np.float64)) / math.sqrt(2)
    t = 1 / (1 + 0.3275911 * x)
    erf = 1 - sum(factor * t**power for power, factor in enumerate(_ERF, 1)) * np.exp(-(x**2))
    return np.asarray(rows * (1 + np.sign(rows) * erf) / 2, np.float32)


def _sigmoid(rows: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-np.clip(rows, -80, 80))), np.float32)


_ACTIVATIONS: Mapping[str, Rows] = MappingProxyType(
    {
        "Identity": lambda rows: rows,
        "Tanh": np.tanh,
        "ReLU": lambda rows: np.maximum(rows, 0),
        "GELU": _gelu,
        "SiLU": lambda rows: rows * _sigmoid(rows),
        "Sigmoid": _sigmoid,
    }
)


def _module(module: Dense | LayerNorm | Normalize) -> Rows:
    """The function of a module, with its weights. Raises ModelError."""
    if isinstance(module, Normalize):
        return _normalized
    weights = _read_weights(Path(module.file), module.tensors)
    if isinstance(module, LayerNorm):
        scale, shift = weights["norm.weight"], weights["norm.bias"]

        def layer_norm(rows: np.ndarray) -> np.ndarray:
            centered = rows - rows.mean(1, keepdims=True)
            spread = np.sqrt((centered**2).mean(1, keepdims=True) + np.float32(_EPSILON))
            return np.asarray(centered / spread * scale + shift, np.float32)

        return layer_norm
    matrix, bias, added = weights["linear.weight"].T, weights.get("linear.bias"), weights.get("residual.weight")
    activation = _ACTIVATIONS[module.activation]

    def dense(rows: np.ndarray) -> np.ndarray:
        product = rows @ matrix
        result = activation(product if bias is None else product + bias)
        if module.residual != "none":
            result = result + (rows if added is None else rows @ added.T)
        return np.asarray(result, np.float32)

    return dense


def _read_weights(file: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file as float32. Raises ModelError."""
    try:
        stored = dict(safetensors.deserialize(file.read_bytes()))  # type: ignore[no-untyped-call]
        return {name: _float32(stored[name]["data"], stored[name]["dtype"]).reshape(shapes[name]) for name in shapes}
    except (safetensors.SafetensorError, OSError, KeyError, ValueError) as error:
        raise ModelError(f"{file} is damaged or was changed ({error}); download it again") from error


def _float32(data: bytes, dtype: str) -> np.ndarray:
    if dtype == "BF16":  # the upper half of a float32
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, {"F16": "<f2", "F32": "<f4"}[dtype]).astype(np.float32)


class EmbeddingBatch:
    """Prompts that are embedded together. `requests` are the requests for the engine. id: of the whole batch.

    adapters: one for each prompt; (): the model alone.
    """

    def __init__(
        self,
        generations: Sequence[Generation],
        pooling: Pooling,
        namespace: Namespace = NO_NAMESPACE,
        scheduling_params: SchedulingParams = DEFAULT_SCHEDULING_PARAMS,
        id: str | None = None,
        adapters: Sequence[Adapter | None] = (),
    ) -> None:
        self.id = id or f"embd-{uuid4().hex}"
        each = adapters or [None] * len(generations)
        self.requests = [
            generation.request(
                prompt_request_id(self.id, i), pooling, namespace, scheduling_params=scheduling_params, adapter=adapter
            )
            for i, (generation, adapter) in enumerate(zip(generations, each, strict=True))
        ]
        self._pooled = {each.id: PooledPrompt(each.id, each.prompt, pooling) for each in self.requests}

    def __iter__(self) -> Iterator[PooledPrompt]:
        """The prompts in their order."""
        return iter(self._pooled.values())

    @property
    def finished(self) -> bool:
        """Whether all prompts are computed."""
        return not any(map(self.is_open, self._pooled))

    def is_open(self, request_id: str) -> bool:
        """Whether a prompt has not finished."""
        return self._pooled[request_id].finish_reason is None

    def process_output(self, output: Output) -> PooledPrompt:
        """Add an output and return its prompt. Raises EmbeddingFailed, EmbeddingDeadlineMissed."""
        one = self._pooled[output.request_id]
        one.accumulate(output)
        if output.finish_reason == "error":
            raise EmbeddingFailed(f"a prompt could not be embedded: {output.error}")
        if output.finish_reason == "abort":
            raise EmbeddingDeadlineMissed(output.error)
        return one
