"""Newcomers: requests that wait and have never run. Only counts."""

from quire.core.request import Request


class Newcomers:
    """Requests of which no sequence has had a row yet, and the tokens of their prompts."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._tokens: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tokens

    def add(self, request: Request) -> None:
        """One comes."""
        self._tokens[request.id] = len(request.prompt)
        self.num_tokens += len(request.prompt)

    def drop(self, request_id: str) -> None:
        """One begins, or has ended; it may have begun before."""
        self.num_tokens -= self._tokens.pop(request_id, 0)
