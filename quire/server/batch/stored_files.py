"""Files in the store, with OpenAI's objects: those that tenants upload, and the results of batches."""

from typing import Any

TTL = 30 * 86_400  # seconds for which a file is stored, if nothing else is requested
PIECE_BYTES = 2**18  # of one piece of the content


def file_object(id: str, filename: str, purpose: str, num_bytes: int, created_at: int, ttl: int) -> dict[str, Any]:
    """The object of a file. ttl: seconds for which it is stored."""
    return {
        "id": id,
        "object": "file",
        "bytes": num_bytes,
        "created_at": created_at,
        "expires_at": created_at + ttl,
        "filename": filename,
        "purpose": purpose,
        "status": "processed",
        "status_details": None,
    }
