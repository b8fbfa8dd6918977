"""The table of other servers' fields in docs/api.md. Run this file to insert it again."""

import json
from itertools import groupby

from generated_part import GeneratedPart

from quire.server.known_fields import KNOWN, Known

PLACES = {"": "body", "options": "`options`", "parameters": "`parameters`", "sampling_params": "`sampling_params`"}


def _meaning(known: Known) -> str:
    if known.own:
        return f"as `{known.own}`"
    if known.meaning is not None:
        about = " ".join((known.meaning.__doc__ or "").split())
        return about.partition(": ")[2].rstrip(".") or about
    if known.accepted is None:
        return "accepted without effect"
    values = ", ".join(f"`{json.dumps(value)}`" for value in known.accepted)
    accepted = f"refused, except {values}" if values else "refused"
    return f"{accepted}. In place of it: {known.instead}" if known.instead else accepted


def table() -> str:
    """One row for the fields of a place that the same servers have, and that mean the same."""
    rows = ["| of the | field | of | meaning |", "|---|---|---|---|"]
    for place, fields in KNOWN.items():
        kinds = [(PLACES[place], ", ".join(known.servers), _meaning(known), name) for name, known in fields.items()]
        for (where, servers, meaning), same in groupby(kinds, key=lambda kind: kind[:3]):
            names = ", ".join(f"`{name}`" for *_, name in same)
            rows.append(f"| {where} | {names} | {servers} | {meaning} |")
    return "\n".join(rows) + "\n"


PART = GeneratedPart(
    "api.md",
    begin="<!-- fields of other servers: begin -->\n",
    end="<!-- fields of other servers: end -->\n",
    make=table,
)

if __name__ == "__main__":
    PART.write()
