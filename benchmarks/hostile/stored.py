"""Load on the store: large files that are uploaded and deleted."""

import asyncio
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.hostile.load import Attack

_FILE_BYTES = 32 * 2**20
_PIECE = 2**20
_BEGIN = (
    b'--end\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
    b'--end\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
)
_END = b"\r\n--end--\r\n"


async def deletes(attack: "Attack") -> None:
    """Upload files of 32 MiB and delete them, two at once."""
    await asyncio.gather(*(_upload_and_delete(attack) for _ in range(2)))


async def _upload_and_delete(attack: "Attack") -> None:
    piece = b"a" * _PIECE
    while True:
        reader, writer = await attack.connect()
        try:
            _send_head(attack, writer, "POST /v1/files", len(_BEGIN) + _FILE_BYTES + len(_END))
            writer.write(_BEGIN)
            for _ in range(_FILE_BYTES // _PIECE):
                writer.write(piece)
                await writer.drain()
            writer.write(_END)
            status, body = await _answer(reader)
            attack.statuses[f"upload {status}"] += 1
            if status == "200":
                _send_head(attack, writer, f"DELETE /v1/files/{json.loads(body)['id']}", 0)
                status, _ = await _answer(reader)
                attack.statuses[f"delete {status}"] += 1
        except (ConnectionError, asyncio.IncompleteReadError):
            attack.statuses["closed"] += 1
            await asyncio.sleep(0.01)
        finally:
            writer.transport.abort()


def _send_head(attack: "Attack", writer: asyncio.StreamWriter, line: str, length: int) -> None:
    fields = f"host: 127.0.0.1\r\nauthorization: Bearer {attack.key}\r\ncontent-type: multipart/form-data; boundary=end"
    writer.write(f"{line} HTTP/1.1\r\n{fields}\r\ncontent-length: {length}\r\n\r\n".encode())


async def _answer(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """Status and body."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
    length = next(int(line[15:]) for line in lines if line.startswith("content-length:"))
    return lines[0].split()[1], await reader.readexactly(length)
