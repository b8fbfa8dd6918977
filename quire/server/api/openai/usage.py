"""Usage in streams: which chunks carry the tokens so far. Knows OpenAI's options and vLLM's."""

from quire.server.api.openai.schema import StreamOptions
from quire.server.reply import Reply


class UsageFormat:
    """What `stream_options` say."""

    def __init__(self, options: StreamOptions | None) -> None:
        self._wanted = options is not None and bool(options.include_usage)
        self._always = self._wanted and options is not None and bool(options.continuous_usage_stats)

    def of_chunk(self, reply: Reply) -> dict[str, object]:
        """The fields about usage of a chunk with choices."""
        if not self._wanted:
            return {}
        return {"usage": reply.usage() if self._always else None}

    def at_end(self, reply: Reply) -> list[dict[str, object]]:
        """The usage of the chunk without choices, where one is wanted."""
        return [reply.usage()] if self._wanted else []
