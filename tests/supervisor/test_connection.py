"""The front end's side of the socket to the engine: messages in turns of the event loop, the end, invalid bytes."""

import asyncio
import socket

from quire.supervisor import protocol
from quire.supervisor.connection import Connection
from quire.supervisor.protocol import BadFrame, Report

REPORTS = [Report(f"{number}") for number in range(50)]


async def received(data: bytes, *, ends: bool = True):
    """(messages, error, most messages within one turn of the event loop) of a connection that gets these bytes."""
    ours, theirs = socket.socketpair()
    messages, lost, turns = [], asyncio.get_running_loop().create_future(), []
    connection = Connection(messages.append, lambda _connection, why: lost.set_result(why))
    theirs.sendall(data)
    if ends:
        theirs.close()
    await asyncio.get_running_loop().create_connection(lambda: connection, sock=ours)
    while not lost.done():
        before = len(messages)
        await asyncio.sleep(0)
        turns.append(len(messages) - before)
    theirs.close()
    return messages, lost.result(), max(turns)


def frames(messages):
    return b"".join(map(protocol.encode_frame, messages))


def test_many_messages_are_handled_a_few_in_each_turn_of_the_event_loop():
    messages, why, most = asyncio.run(received(frames(REPORTS)))
    assert (messages, why) == (REPORTS, None)
    assert most <= 4


def test_messages_before_an_invalid_one_are_handled():
    for invalid in (protocol.frame(b"\xc1"), b"\xff" * 8):
        messages, why, _ = asyncio.run(received(frames(REPORTS) + invalid + frames(REPORTS), ends=False))
        assert messages == REPORTS
        assert isinstance(why, BadFrame)


def test_messages_that_were_read_are_handled_when_a_write_fails():
    async def lose() -> list:
        ours, theirs = socket.socketpair()
        messages, lost = [], asyncio.get_running_loop().create_future()
        connection = Connection(messages.append, lambda _connection, why: lost.set_result((why, len(messages))))
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=ours)
        theirs.sendall(frames(REPORTS))
        while not messages:
            await asyncio.sleep(0)
        connection.connection_lost(BrokenPipeError())
        theirs.close()
        return await lost

    assert asyncio.run(lose()) == (None, len(REPORTS))
