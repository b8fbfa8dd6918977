"""Adapter: a LoRA adapter (Hu et al., 2021), identified by its content, as the control plane uses it."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import msgspec

NO_ADAPTERS = "this engine has no adapters; start it with --enable-lora, or leave `adapter` out"
ADAPTER = "adapter"  # what a request waits for while its adapter is loaded; also the cause of the wait


class Adapter(msgspec.Struct, frozen=True, tag=True):
    """An adapter in a folder. Two adapters are the same if their digests are equal, whatever their names and paths are.

    An activated adapter (aLoRA: Greenewald et al., 2025) applies from the last place in the prompt on at which its
    invocation tokens are. Before that place, the KV is that of the model alone.
    """

    digest: str  # hex digits of the SHA-256 of its config and tensors
    name: str  # by which the request named it, for messages
    path: str  # of the folder
    num_bytes: int  # of its matrices in memory
    rank: int  # the largest of its matrices
    invocation_tokens: tuple[int, ...] = ()  # of an activated adapter; (): it applies to all tokens

    def start_in(self, prompt: Sequence[int]) -> int | None:
        """The first position at which it applies; None if an activated adapter is not invoked in the prompt."""
        if not self.invocation_tokens:
            return 0
        wanted = list(self.invocation_tokens)
        size = len(wanted)
        for begin in range(len(prompt) - size, -1, -1):
            if prompt[begin] == wanted[0] and list(prompt[begin : begin + size]) == wanted:
                return begin
        return None


class AdapterLoader(Protocol):
    """Reads adapters into memory, beside the steps. All methods are called from the engine's thread."""

    def read(self, name: str, path: str, when_done: Callable[[Future[Adapter]], None]) -> None:
        """Read and check the files of an adapter. when_done: called with the result, from any thread."""

    def start(self, load: "AdapterLoad") -> None:
        """Start a load. The `evicted` adapters leave memory first: no step reads them."""

    def finished(self) -> list[tuple[str, str]]:
        """(digest, error) of the loads that have ended since the last call. The error is "" if the adapter is there."""

    def wait(self, seconds: float) -> None:
        """Block until a load has ended, for at most `seconds`. Returns at once if none is in progress."""

    def close(self) -> None:
        """Stop all loads. No method may be called afterwards."""


class AdapterLoad(msgspec.Struct, frozen=True):
    """An adapter that is to be loaded, and the digests of those that leave memory first."""

    adapter: Adapter
    evicted: tuple[str, ...] = ()
