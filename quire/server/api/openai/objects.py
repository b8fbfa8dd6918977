"""Answers of OpenAI's routes that have objects by id, and pages of them."""

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import Response


class _Id(msgspec.Struct):
    id: str


def json_response(value: object) -> Response:
    """A response with `value` as JSON."""
    return Response(msgspec.json.encode(value), media_type="application/json")


def page_response(objects: Sequence[Any], limit: int) -> Response:
    """The list object of the first `limit` objects. objects: with one more if there are more; dicts or JSON."""
    page = objects[:limit]
    ids = [msgspec.convert(one, _Id) if isinstance(one, dict) else msgspec.json.decode(one, type=_Id) for one in page]
    return json_response(
        {
            "object": "list",
            "data": page,
            "first_id": ids[0].id if ids else None,
            "last_id": ids[-1].id if ids else None,
            "has_more": len(objects) > limit,
        }
    )
