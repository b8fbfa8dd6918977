"""A console whose text cannot control the terminal."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from quire.control_characters import visible


class VisibleConsole(Console):
    """Rich's console. Control characters in text are shown. Those of styles and of live displays are rich's own."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of something that is printed."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)
