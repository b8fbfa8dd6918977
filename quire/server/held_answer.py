"""Large answers: their bytes count for the tenant until the client has read them, and are sent in pieces."""

from collections.abc import Awaitable, Callable, Iterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.server.errors import TenantMemoryFull
from quire.tenant_memory import LARGE, HeldBytes, TenantMemory

TURN_SECONDS = 20.0  # that a request waits for the memory of its tenant
PIECE_BYTES = 2**16  # of an answer that are sent at once; the next piece waits until the client has read


async def hold(held: HeldBytes, num_bytes: int) -> None:
    """Count bytes for the tenant, once it is their turn. Raises TenantMemoryFull after TURN_SECONDS."""
    try:
        await held.hold(num_bytes, TURN_SECONDS)
    except TimeoutError:
        raise TenantMemoryFull(num_bytes) from None


class HeldAnswer(Response):
    """A whole answer in pieces. held: its bytes, which it releases when the client has read them, or has left."""

    def __init__(self, response: Response, held: HeldBytes) -> None:
        self.status_code = response.status_code
        self.raw_headers = response.raw_headers
        self.background = response.background
        self.body = response.body
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. Each piece waits until the connection has room for it."""
        with self._held:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for piece in pieces(bytes(self.body)):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def in_pieces(response: Response, memory: TenantMemory) -> Response:
    """A response that is sent in pieces and counts until it is sent, if it is whole and large; else as it is."""
    if len(getattr(response, "body", b"")) <= LARGE or isinstance(response, HeldAnswer):
        return response
    answer = HeldBytes(memory)
    answer.add(len(response.body))
    return HeldAnswer(response, answer)


def held_answer(response: Response, held: HeldBytes) -> Response:
    """As `in_pieces`, in place of the bytes `held`, which counted while the response was built."""
    answer = in_pieces(response, held.memory)
    held.release()
    return answer


async def answer_in_turn(memory: TenantMemory, num_bytes: int, build: Callable[[], Awaitable[Response]]) -> Response:
    """The response of `build`. What it can have at most counts before it is built, if it is large. Raises as `hold`."""
    if num_bytes <= LARGE:
        return await build()
    with HeldBytes(memory) as held:
        await hold(held, num_bytes)
        return held_answer(await build(), held)


def pieces(data: bytes) -> Iterator[bytes]:
    """The data in pieces of PIECE_BYTES."""
    return (data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES))
