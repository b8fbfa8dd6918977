"""The adapters of LoRARequests, for an engine in this process."""

from collections.abc import Sequence
from concurrent.futures import Future
from os.path import abspath
from queue import SimpleQueue

from quire.core.adapter import Adapter
from quire.engine.engine import Engine
from quire.errors import RequestError
from quire.params import LoRARequest

LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None  # one for all prompts, or one for each


class RequestedAdapters:
    """Reads the folder of each LoRARequest once, unless its `load_inplace` asks for more."""

    def __init__(self, engine: Engine, *, is_enabled: bool) -> None:
        self._engine = engine
        self._is_enabled = is_enabled
        self._known: dict[tuple[str, str], Adapter] = {}  # by name and path

    def each(self, given: LoRARequests, count: int) -> list[Adapter | None]:
        """The adapter of each of `count` prompts. Raises RequestError, ModelError."""
        each = list(given) if isinstance(given, list | tuple) else [given] * count
        if len(each) != count:
            raise RequestError(f"{count} prompts need as many lora_requests, not {len(each)}", "lora_request")
        return [None if one is None else self._adapter(one) for one in each]

    def _adapter(self, asked: object) -> Adapter:
        if not isinstance(asked, LoRARequest):
            raise RequestError(f"lora_request must be LoRARequest(...), not {type(asked).__name__}", "lora_request")
        if not self._is_enabled:
            raise RequestError("lora_request needs LLM(..., enable_lora=True)", "lora_request")
        key = (asked.lora_name, abspath(asked.lora_path))
        if asked.load_inplace or key not in self._known:
            read: SimpleQueue[Future[Adapter]] = SimpleQueue()
            self._engine.read_adapter(*key, read.put)
            self._known[key] = read.get().result()
        return self._known[key]
