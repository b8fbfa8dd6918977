"""Responses in the store: how long conversations and event streams are written and read there in pieces.

The body of the object is JSON with the response, its input (the items that it continues) and its events. A list of more
than LARGE bytes is not in the body but in the contents of the object, in pieces that are lists, and the body has its
`Pieces`. The pieces of the input come before those of the events. So a small request that names a large response reads
one piece after the other, and a response keeps nothing of its input in memory while it is generated.

What is read counts for the tenant, before it is read. All of it that grows with the object is done on its threads.
"""

from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, dropwhile, pairwise, takewhile
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import Raw

from quire.errors import RequestError
from quire.server.api.openai.responses_output import response_of
from quire.server.api.openai.responses_schema import Item
from quire.server.api.openai.responses_tools import CALLS, RESULTS
from quire.server.errors import UnknownObject
from quire.server.held_answer import hold
from quire.server.request_body import MAX_BODY
from quire.server.service import Service
from quire.server.sse import event
from quire.server.store import PIECE_BYTES as ROW_BYTES
from quire.server.store import LargerBody, Store
from quire.tenant_memory import LARGE, HeldBytes
from quire.tokenizer.chat_costs import ITEM_SIZE

T = TypeVar("T")

TTL = 30 * 86_400  # seconds for which a response is stored
PIECE_BYTES = 2**16  # of a list in pieces, from which a piece ends: a longer item is a piece of its own
MAX_REFERENCES = 1024  # responses that the item references of one request may be in
OBJECT_BYTES = (
    10  # of Python objects for each byte of items as JSON: 9.4 for items of many empty parts, 1 for long texts
)
_CHARACTER_BYTES = 80  # of Python objects for each character that `num_characters` counts: 75 for the least items

_SHOWN = frozenset(
    (
        *("type", "role", "content", "call_id", "name", "namespace", "arguments", "input", "output", "summary"),
        "encrypted_content",
    )
)
_SHOWN_OF_PARTS = frozenset(("type", "text", "refusal"))


class StoredResponse(msgspec.Struct):
    """A response in the store. input, events: a list or `Pieces`; events: null without a stream in the background."""

    response: Raw
    input: Raw
    events: Raw = Raw(b"null")


class Pieces(msgspec.Struct):
    """A list in the contents. num_rows: of each piece: a long one has several places. largest: bytes of the longest."""

    num_rows: list[int]
    num_bytes: int
    largest: int

    def places(self, first: int = 0) -> list[range]:
        """The places of each piece in the contents. first: of the first piece."""
        ends = accumulate(self.num_rows, initial=first)
        return [range(*pair) for pair in pairwise(ends)]


def pieces_of(value: Raw) -> Pieces | None:
    """The pieces that a list in the body of an object stands for; None if it is the list."""
    return msgspec.json.decode(value, type=Pieces) if bytes(memoryview(value)[:1]) == b"{" else None


class _Output(msgspec.Struct):
    output: list[dict[str, Any]]
    status: str


class _RawOutput(msgspec.Struct):
    output: Raw


class _Head(msgspec.Struct):
    """The id of an item, or the type of an event."""

    id: str = ""
    type: str = ""


class Input(NamedTuple):
    """What a response continues, before it is stored.

    source: the id of a stored response and its input, with whose pieces it begins. lists: JSON lists of the items
    behind these, as pieces.
    """

    source: tuple[str, Pieces] | None
    lists: Sequence[bytes]

    @property
    def num_bytes(self) -> int:
        """Bytes of all items."""
        return sum(map(len, self.lists)) + (0 if self.source is None else self.source[1].num_bytes)


class Earlier(NamedTuple):
    """The items before a request.

    source: of `Input`. kept: items, without those in the pieces of `source` that cannot fit into the context. rest:
    items behind the pieces of `source`. is_cut: whether items are missing.
    """

    kept: Sequence[Item]
    rest: Sequence[Item]
    source: tuple[str, Pieces] | None = None
    is_cut: bool = False


def encoded_lists(encoded: Iterable[bytes]) -> list[bytes]:
    """Values that are JSON as JSON lists, each of which ends with PIECE_BYTES bytes."""
    lists, values, num_bytes = list[bytes](), list[bytes](), 0
    for value in encoded:
        if values and num_bytes + len(value) > PIECE_BYTES:
            lists.append(b"[" + b",".join(values) + b"]")
            values, num_bytes = [], 0
        values.append(value)
        num_bytes += len(value)
    return [*lists, b"[" + b",".join(values) + b"]"]


def new_input(earlier: Earlier, items: Sequence[Item]) -> Input:
    """What a response continues: the items before, and those of its request.

    Raises UnicodeEncodeError for text that cannot be sent back, RequestError beyond MAX_BODY.
    """
    input = Input(earlier.source, encoded_lists(map(msgspec.json.encode, [*earlier.rest, *items])))
    if input.num_bytes > MAX_BODY:
        raise RequestError(
            f"the conversation has {input.num_bytes:,} bytes with its earlier items, more than {MAX_BODY:,}; begin "
            "another one",
            "input",
        )
    return input


class ResponseObject:
    """The object of one response in the store. input: as in `StoredResponse`. num_rows: of its contents."""

    def __init__(self, store: Store, tenant: str, id: str) -> None:
        self._store = store
        self._tenant = tenant
        self._id = id
        self._exists = False
        self.num_rows = 0
        self.input = Raw(b"[]")
        self.is_saved = False  # whether it has a body

    async def begin(self, input: Input) -> None:
        """Store the input: a short one with `save`, others at once. Raises StoreFull, StoreUnavailable, Busy."""
        if input.num_bytes <= LARGE and input.source is None:
            self.input = Raw(input.lists[0])
            return
        await self._create(None)
        num_rows, largest = list[int](), 0
        if input.source is not None:
            id, source = input.source
            num_rows, largest = source.num_rows, source.largest
            self.num_rows = sum(num_rows)
            if not await self._store.copy_contents(self._tenant, "response", id, self._id, range(self.num_rows)):
                raise UnknownObject("response", id, "previous_response_id")
        num_rows = [*num_rows, *[await self.append(one) for one in input.lists]]
        largest = max(largest, *map(len, input.lists))
        self.input = Raw(msgspec.json.encode(Pieces(num_rows, input.num_bytes, largest)))

    async def append(self, piece: bytes) -> int:
        """Add a piece to the contents. Returns the number of its rows. Raises StoreFull, StoreUnavailable, Busy."""
        await self._store.append(self._tenant, "response", self._id, piece)
        number = max(1, -(-len(piece) // ROW_BYTES))
        self.num_rows += number
        return number

    async def save(self, response: bytes, events: bytes = b"null", *, pinned: bool = False) -> None:
        """Store the response, and its events as in `StoredResponse`. pinned: whether it is still generated.

        Raises StoreFull, StoreUnavailable, Busy, and UnknownObject if it was deleted meanwhile.
        """
        body = msgspec.json.encode(StoredResponse(Raw(response), self.input, Raw(events)))
        if self._exists:
            end = self._store.clock() + TTL
            if not await self._store.update(self._tenant, "response", self._id, body, expires_at=end, pinned=pinned):
                raise UnknownObject("response", self._id)
        else:
            await self._create(body, pinned=pinned)
        self.is_saved = True

    async def delete(self) -> None:
        """Delete the object, if there is one."""
        if self._exists:
            self._exists = False
            await self._store.delete(self._tenant, "response", self._id)

    @property
    def is_unfinished(self) -> bool:
        """Whether there is an object without a body. It cannot be read."""
        return self._exists and not self.is_saved

    async def _create(self, body: bytes | None, *, pinned: bool = True) -> None:
        end = self._store.clock() + TTL
        self._exists = True  # also if this call is cancelled
        await self._store.create(self._tenant, "response", self._id, body, expires_at=end, pinned=pinned)


class StoredResponses:
    """Reads the stored responses of all tenants, within the memory and on the threads of each."""

    def __init__(self, service: Service, store: Store) -> None:
        self._pool = service.thread_pool
        self._store = store

    async def load(
        self, tenant: str, id: str, held: HeldBytes, param: str | None = None, object_bytes: int = 2
    ) -> StoredResponse:
        """A response. held: counts its body, if that is large. object_bytes: in memory for each byte of the body.

        param: the field that names it. Raises UnknownObject, and as `hold`.
        """
        try:
            body = await self._store.get(tenant, "response", id, LARGE)
        except LargerBody as error:
            await hold(held, object_bytes * error.num_bytes)
            body = await self._store.get(tenant, "response", id)
        found = _there(body, id, param)
        return await self.run(tenant, len(found), partial(msgspec.json.decode, found, type=StoredResponse))

    async def run(self, tenant: str, num_bytes: int, work: Callable[[], T]) -> T:
        """The result of `work` on so many bytes: on a thread if they are many."""
        return work() if num_bytes <= LARGE else await self._pool.run(tenant, work)

    async def earlier(self, tenant: str, id: str, held: HeldBytes, max_characters: int) -> Earlier:
        """The items that a response continues, and its output. Raises RequestError, UnknownObject, and as `hold`.

        Of a long conversation the last items are read until they have more than `max_characters`, and then the messages
        of the system at the begin. What is left begins with a message of the user.
        """
        param = "previous_response_id"
        stored = await self.load(tenant, id, held, param, OBJECT_BYTES)
        decode: Callable[[], _Output] = partial(msgspec.json.decode, stored.response, type=_Output)
        last = await self.run(tenant, len(stored.response), decode)
        if last.status in ("queued", "in_progress"):
            raise RequestError("the response is still generated; wait for its end", param)
        pieces = pieces_of(stored.input)
        if pieces is None:
            items = await self.run(tenant, len(stored.input), partial(_decoded_items, stored.input))
            return Earlier([*items, *last.output], [*items, *last.output])
        objects = min(OBJECT_BYTES * pieces.num_bytes, _CHARACTER_BYTES * max_characters + 2 * pieces.largest)
        await hold(held, objects)
        kept, unread, num = deque[Item](), pieces.places(), sum(map(num_characters, last.output))
        while unread and num <= max_characters:
            items = await self._piece(tenant, id, unread.pop(), _shown_items, param)
            kept.extendleft(reversed(items))
            num += sum(map(num_characters, items))
        if unread:
            begin = await self._system_messages(tenant, id, unread, max_characters)
            kept = deque([*begin, *_from_a_turn(kept)])
        return Earlier([*kept, *last.output], last.output, (id, pieces), is_cut=bool(unread))

    async def referenced(self, tenant: str, ids: Sequence[str], held: HeldBytes) -> dict[str, Item]:
        """The stored items of these ids. Each response is read once, its output before its input.

        Raises RequestError, UnknownObject, and as `hold`.
        """
        by_response: dict[str, set[str]] = {}
        for id in ids:
            by_response.setdefault(response_of(id), set()).add(id)
        if len(by_response) > MAX_REFERENCES:
            raise RequestError(f"input refers to more than {MAX_REFERENCES} responses; send the items", "input")
        found: dict[str, Item] = {}
        num_bytes = 0
        for response_id, wanted in by_response.items():
            try:
                async for items, size in self._found(tenant, response_id, wanted, held):
                    found |= items
                    num_bytes += size
                    held.add(OBJECT_BYTES * size if size > LARGE else 0)
                    if num_bytes > MAX_BODY:
                        raise RequestError(
                            f"the items that input refers to have more than {MAX_BODY:,} bytes; refer to fewer", "input"
                        )
            except UnknownObject:
                pass  # which item it is, is said below
            for id in wanted - found.keys():
                raise UnknownObject("item", id, "input")
        return found

    async def page(
        self, tenant: str, id: str, held: HeldBytes, limit: int, *, after: str | None, ascending: bool
    ) -> list[Raw]:
        """At most `limit` of the items that a response continues, as JSON, behind the item `after`.

        held: counts them, if they are large. Raises UnknownObject, and as `hold`.
        """
        stored = await self.load(tenant, id, held)
        pieces = pieces_of(stored.input)
        if pieces is not None:
            await hold(held, pieces.num_bytes)
        all_places: list[range | None] = [None] if pieces is None else [*pieces.places()]
        found, is_behind = list[Raw](), after is None
        for places in all_places if ascending else reversed(all_places):
            if places is None:
                items = await self.run(tenant, len(stored.input), partial(_items_by_id, stored.input))
            else:
                items = await self._piece(tenant, id, places, _items_by_id)
            for item_id, item in items if ascending else reversed(items):
                if is_behind:
                    found.append(item)
                is_behind = is_behind or item_id == after
                if len(found) == limit:
                    return found
        if not is_behind:
            raise UnknownObject("item", str(after), "after")
        return found

    async def replayed(
        self, tenant: str, id: str, stored: StoredResponse, first: int, held: HeldBytes
    ) -> AsyncIterator[bytes]:
        """The events of a stored response from this sequence number on, as they are sent: a piece at a time.

        held: counts the longest piece, if it is large. Raises as `hold`.
        """
        pieces, before = pieces_of(stored.events), pieces_of(stored.input)
        if pieces is not None and pieces.largest > 2 * PIECE_BYTES:
            await hold(held, 2 * pieces.largest)
        start = 0 if before is None else sum(before.num_rows)

        async def events() -> AsyncIterator[bytes]:
            if pieces is None:
                yield (await self.run(tenant, len(stored.events), partial(_sent, first, stored.events)))[1]
                return
            number = 0
            for places in pieces.places(start):
                num_events, data = await self.sent_piece(tenant, id, places, max(0, first - number))
                number += num_events
                if data:
                    yield data

        return events()

    async def sent_piece(self, tenant: str, id: str, places: range, skip: int) -> tuple[int, bytes]:
        """The number of events in a piece of the contents, and how all but the first `skip` of them are sent."""
        return await self._piece(tenant, id, places, partial(_sent, skip))

    async def _found(
        self, tenant: str, id: str, wanted: Collection[str], held: HeldBytes
    ) -> AsyncIterator[tuple[dict[str, Item], int]]:
        """The wanted items of a response with their bytes as JSON, a piece at a time."""
        stored = await self.load(tenant, id, held)
        pieces, output = pieces_of(stored.input), partial(_output, stored.response)
        left = set(wanted)
        found = await self.run(tenant, len(stored.response), lambda: _wanted(left, output()))
        yield found
        left -= found[0].keys()
        if pieces is None:
            if left:
                yield await self.run(tenant, len(stored.input), partial(_wanted, left, stored.input))
            return
        await hold(held, 2 * pieces.largest)
        for places in pieces.places():
            if not left:
                return
            found = await self._piece(tenant, id, places, partial(_wanted, left))
            yield found
            left -= found[0].keys()

    async def _system_messages(self, tenant: str, id: str, pieces: Sequence[range], max_characters: int) -> list[Item]:
        """The messages of the system with which a conversation begins, within its first pieces."""
        found, num = list[Item](), 0
        for places in pieces:
            items = await self._piece(tenant, id, places, _shown_items)
            begin = list(takewhile(_is_of_system, items))
            found += begin
            num += sum(map(num_characters, begin))
            if len(begin) < len(items) or num > max_characters:
                break
        return found

    async def _piece(
        self, tenant: str, id: str, places: range, work: Callable[[bytes], T], param: str | None = None
    ) -> T:
        """The result of `work`, on a thread, with a piece of the contents. Raises UnknownObject if it was deleted."""
        rows = [_there(await self._store.content(tenant, "response", id, place), id, param) for place in places]
        data = rows[0] if len(rows) == 1 else b"".join(rows)
        del rows
        return await self._pool.run(tenant, partial(work, data))


def _there(data: bytes | None, id: str, param: str | None = None) -> bytes:
    if data is None:
        raise UnknownObject("response", id, param)
    return data


def num_characters(item: Item) -> int:
    """The least number of characters, as chat_costs.py counts them, that the chat message of an item has."""
    values = (item.get("content") or item.get("summary"), *map(item.get, ("output", "arguments", "input")))
    return ITEM_SIZE + sum(map(_num_characters, values))


def _num_characters(content: object) -> int:
    if isinstance(content, str):
        return len(content)
    parts = content if isinstance(content, list) else ()
    return sum(ITEM_SIZE + len(part.get("text") or "") for part in parts)


def _decoded_items(data: bytes | Raw) -> list[dict[str, Any]]:
    return msgspec.json.decode(data, type=list[dict[str, Any]])


def _shown_items(data: bytes) -> list[dict[str, Any]]:
    """Items without the fields that no chat message has, such as logprobs and a client's own, which can be long."""
    return [{name: _shown(item[name]) for name in item if name in _SHOWN} for item in _decoded_items(data)]


def _shown(value: object) -> object:
    if not isinstance(value, list):
        return value
    return [{name: part[name] for name in part if name in _SHOWN_OF_PARTS} for part in value]


def _is_of_system(item: Item) -> bool:
    return item["type"] == "message" and item.get("role") in ("system", "developer")


def _from_a_turn(items: Iterable[Item]) -> Iterator[Item]:
    """The items from the first message of the user on, without results of calls that are not among them."""
    calls = set[object]()
    for item in dropwhile(lambda item: item.get("role") != "user", items):
        if item["type"] in CALLS:
            calls.add(item.get("call_id"))
        if item["type"] not in RESULTS or item.get("call_id") in calls:
            yield item


def _raws(data: bytes | Raw) -> list[Raw]:
    return msgspec.json.decode(data, type=list[Raw])


def _output(response: Raw) -> Raw:
    return msgspec.json.decode(response, type=_RawOutput).output


def _items_by_id(data: bytes | Raw) -> list[tuple[str, Raw]]:
    """Items as JSON, copied, so that they do not keep the piece in memory."""
    heads = msgspec.json.decode(data, type=list[_Head])
    return [(head.id, raw.copy()) for head, raw in zip(heads, _raws(data), strict=True)]


def _wanted(ids: Collection[str], data: bytes | Raw) -> tuple[dict[str, Item], int]:
    """The items of these ids, and their bytes as JSON. Of those with one id, the first."""
    found, num_bytes = dict[str, Item](), 0
    for head, raw in zip(msgspec.json.decode(data, type=list[_Head]), _raws(data), strict=True):
        if head.id in ids and head.id not in found:
            found[head.id] = msgspec.json.decode(raw)
            num_bytes += len(raw)
    return found, num_bytes


def _sent(skip: int, data: bytes | Raw) -> tuple[int, bytes]:
    """The number of events in a list, and how all but the first `skip` of them are sent."""
    events = _raws(data)
    return len(events), b"".join(map(sent_event, events[skip:]))


def sent_event(one: Raw) -> bytes:
    """An event, kept as JSON, as it is sent."""
    return event(one, msgspec.json.decode(one, type=_Head).type)
