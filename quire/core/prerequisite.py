"""Prerequisites: what a request waits for before it is queued, prepared beside the steps of other requests."""

from typing import Protocol

from quire.core.request import Request


class Prerequisite(Protocol):
    """Prepares one kind of thing for the requests of an engine, such as the grammars of their constraints.

    All methods are called from the engine's thread.
    """

    name: str  # in `Request.prerequisites`; also the cause of the wait in explanations, metrics and on the page

    def is_needed(self, request: Request) -> bool:
        """Whether the request cannot run without it."""

    def submit(self, request: Request) -> None:
        """Start to prepare it for a request that needs it."""

    def finished(self) -> list[tuple[str, str]]:
        """New results as (request id, error); the error is "" if all is ready. Each result is returned once.

        An error ends the request. Unless the prerequisite is its constraint, clients get it as an error of the server.
        """

    def forget(self, request_id: str) -> None:
        """Release a request whose sequences have begun, or that has ended. An unknown id is ignored."""

    def wait(self, seconds: float) -> None:
        """Block until a preparation is finished, for at most `seconds`. Returns at once if none is in progress."""

    def close(self) -> None:
        """Stop all preparations. No method may be called afterwards."""
