"""HTTP client of one server, for JSON and server-sent events."""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import httpx2

from quire.errors import ConfigError, QuireError, RequestError
from quire.lang.errors import GenerationFailed

_MAX_ATTEMPTS = 6
_RETRY_SECONDS = 1.0  # seconds before the first retry without a Retry-After; doubled each time
_MAX_RETRY_SECONDS = 30.0
_MAX_END_SECONDS = 1.0  # seconds to wait for the end of the stream after [DONE]
_RETRY_STATUSES = (429, 503)
_CONNECTIONS = 1024
_TIMEOUT = httpx2.Timeout(600.0, connect=10.0)  # seconds; a request may wait in the server's queue


class Http:
    """Client of one server. To be used on one event loop. verify: a file of certificates, or False to check none.

    Raises ConfigError if that is no file of certificates.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        *,
        verify: str | bool | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        try:
            self._client = httpx2.AsyncClient(
                base_url=self.base_url,
                headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
                timeout=_TIMEOUT,
                limits=httpx2.Limits(max_connections=_CONNECTIONS),
                verify=_context(verify=verify),
                transport=transport,
            )
        except OSError as error:
            raise ConfigError(f"verify must name a file of certificates, not {verify!r}: {error}") from error

    async def get(self, path: str) -> Any:  # noqa: ANN401
        """GET a path and return the JSON. Raises as `post` does."""
        return await self._json("GET", path, None)

    async def post(self, path: str, body: Mapping[str, object]) -> Any:  # noqa: ANN401
        """POST a body and return the JSON. Raises RequestError for 4xx but 429, GenerationFailed for other errors."""
        return await self._json("POST", path, body)

    async def events(self, path: str, body: Mapping[str, object]) -> AsyncGenerator[Any]:
        """POST a body and yield the JSON of each event until [DONE].

        Raises as `post` does, and GenerationFailed for an error event and for a stream without [DONE].
        """
        async with self._request("POST", path, body) as response:
            lines = response.aiter_lines()
            try:
                async for line in lines:
                    data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                    if data == "[DONE]":
                        await _read_to_end(lines)
                        return
                    if data:
                        event = _parse_json(data)
                        _check_event(event)
                        yield event
            except httpx2.HTTPError as error:
                raise self._unreachable(error) from error
        raise GenerationFailed(f"the response of {self.base_url} was cut off: it ends without [DONE]")

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _json(self, method: str, path: str, body: Mapping[str, object] | None) -> Any:  # noqa: ANN401
        async with self._request(method, path, body) as response:
            try:
                data = await response.aread()
            except httpx2.HTTPError as error:
                raise self._unreachable(error) from error
        return _parse_json(data.decode("utf-8", "replace"))

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: Mapping[str, object] | None
    ) -> AsyncGenerator[httpx2.Response]:
        """A response with a status below 400. Retries after 429 and 503."""
        for attempt in range(_MAX_ATTEMPTS):
            request = self._client.build_request(method, path, json=body)
            try:
                response = await self._client.send(request, stream=True)
            except httpx2.HTTPError as error:
                raise self._unreachable(error) from error
            try:
                if response.status_code < 400:
                    yield response
                    return
                response_text = (await response.aread()).decode("utf-8", "replace")
                if response.status_code not in _RETRY_STATUSES or attempt == _MAX_ATTEMPTS - 1:
                    raise _response_error(response.status_code, response_text)
            finally:
                await response.aclose()
            await asyncio.sleep(_retry_delay(response, attempt))

    def _unreachable(self, error: httpx2.HTTPError) -> GenerationFailed:
        return GenerationFailed(f"{self.base_url} does not respond: {error or type(error).__name__}")


async def _read_to_end(lines: AsyncIterator[str]) -> None:
    """Read a stream to its end, so that the connection is reused; stops after `_MAX_END_SECONDS` seconds."""
    with suppress(TimeoutError, httpx2.HTTPError):
        async with asyncio.timeout(_MAX_END_SECONDS):
            async for _ in lines:
                pass


def _context(*, verify: str | bool | None) -> ssl.SSLContext | bool:
    if isinstance(verify, str):
        return ssl.create_default_context(cafile=verify)
    return True if verify is None else verify


@contextmanager
def response_errors() -> Iterator[None]:
    """Context manager that turns errors of reading a response, such as a missing key, into GenerationFailed."""
    try:
        yield
    except QuireError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise GenerationFailed(f"the server's response does not follow its API: {error!r:.200}") from error


def _retry_delay(response: httpx2.Response, attempt: int) -> float:
    try:
        wait = float(response.headers.get("retry-after", ""))
    except ValueError:
        wait = _RETRY_SECONDS * 2**attempt
    return min(max(wait, 0.0), _MAX_RETRY_SECONDS)


def _response_error(status: int, response_text: str) -> Exception:
    """The error of a response: RequestError for 4xx but 429, else GenerationFailed."""
    message, param = _error_message(response_text)
    if status < 500 and status not in _RETRY_STATUSES:
        return RequestError(f"the server rejected the request with {status}: {message}", param)
    return GenerationFailed(f"the server failed with {status}: {message}")


def _error_message(response_text: str) -> tuple[str, str | None]:
    try:
        error = json.loads(response_text)
    except ValueError:
        return response_text[:500], None
    if isinstance(error, dict) and isinstance(error.get("error"), dict):
        error = error["error"]
    if not isinstance(error, dict):
        return response_text[:500], None
    message = error.get("message", error.get("detail", response_text[:500]))
    param = error.get("param")
    return str(message), param if isinstance(param, str) else None


def _check_event(event: object) -> None:
    if isinstance(event, dict) and isinstance(event.get("error"), dict):
        raise GenerationFailed(f"the server stopped with an error: {_error_message(json.dumps(event))[0]}")


def _parse_json(data: str) -> Any:  # noqa: ANN401
    try:
        return json.loads(data)
    except ValueError as error:
        raise GenerationFailed(f"the server's response is not JSON: {data[:200]!r}") from error
