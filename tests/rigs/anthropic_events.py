"""Reads streams of Anthropic's events as its client does."""

import json


def events_of(text):
    """(name, data) of each event of a stream."""
    events = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


def message_of(events):
    """The message that a client builds. The input of a call whose text is no JSON stays empty."""
    message, texts = {}, {}
    for name, data in events:
        match name:
            case "message_start":
                message = data["message"]
            case "content_block_start":
                assert data["index"] == len(message["content"])
                message["content"].append(data["content_block"])
                texts[data["index"]] = ""
            case "content_block_delta":
                block, delta = message["content"][data["index"]], data["delta"]
                if delta["type"] == "input_json_delta":
                    texts[data["index"]] += delta["partial_json"]
                else:
                    field = delta["type"].removesuffix("_delta")
                    block[field] = delta[field] if field == "signature" else block[field] + delta[field]
            case "content_block_stop":
                block = message["content"][data["index"]]
                if block["type"] == "tool_use":
                    try:
                        block["input"] = json.loads(texts[data["index"]])
                    except ValueError:
                        block["input"] = {}
            case "message_delta":
                message |= data["delta"]
                message["usage"] |= data["usage"]
    return message
