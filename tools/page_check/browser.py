"""Headless Chromium that reaches nothing but the server, and notes what a page must not do."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from playwright.sync_api import Browser, ConsoleMessage, Page, Route, sync_playwright

FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-default-apps", "--disable-domain-reliability"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
_WATCH_POLICY = """
document.addEventListener('securitypolicyviolation', (event) => {
  console.error(`CSP: ${event.violatedDirective} ${event.blockedURI}`);
});
"""


class NoBrowser(Exception):
    """There is no Chromium. The message says how to install it."""


def chromium() -> str:
    """The path of the browser. Raises NoBrowser."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    raise NoBrowser("page-check needs Chromium. On Debian: apt-get install -y chromium")


@contextmanager
def browser() -> Iterator[Browser]:
    """A running browser. Raises NoBrowser."""
    path = chromium()
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        try:
            yield started
        finally:
            started.close()


@dataclass
class Watched:
    """A page and what it did. strangers: requests to another address than the server's. errors: of scripts, of the
    console and of the content security policy."""

    page: Page
    strangers: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def unexpected(self, *expected: str) -> list[str]:
        """Errors that have none of these texts in them."""
        return [error for error in self.errors if not any(text in error for text in expected)]


@contextmanager
def watched(
    started: Browser,
    url: str,
    *,
    width: int = 1440,
    height: int = 900,
    scheme: str = "light",
    path: str = "",
    is_touch: bool = False,
) -> Iterator[Watched]:
    """Open the page of a server in a context of its own. scheme: `light` or `dark`."""
    size = {"width": width, "height": height}
    context = started.new_context(viewport=size, color_scheme=scheme, has_touch=is_touch, is_mobile=is_touch)  # type: ignore[arg-type]
    context.set_default_timeout(15_000)
    page = context.new_page()
    seen = Watched(page)

    def only_the_server(route: Route) -> None:
        if route.request.url.startswith(url):
            route.continue_()
        else:
            seen.strangers.append(route.request.url)
            route.abort()

    def note(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            seen.errors.append(f"{message.text} {message.location.get('url', '')}")

    context.route("**/*", only_the_server)
    context.add_init_script(_WATCH_POLICY)
    page.on("console", note)
    page.on("pageerror", lambda error: seen.errors.append(str(error)))
    try:
        page.goto(f"{url}/{path}")
        yield seen
    finally:
        context.close()
