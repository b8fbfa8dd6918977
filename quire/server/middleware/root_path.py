"""A path before all routes, under which a reverse proxy offers the server."""

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class RootPathMiddleware:
    """ASGI middleware: requests may have `root_path` before their path, for proxies that do not remove it.

    It must be the outermost one, so that the others see the paths of routes.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app with the path without `root_path`, which `/docs` finds in the scope."""
        if scope["type"] != "lifespan":
            begin = f"{self._root_path}/"
            path = scope["path"]
            if scope["type"] == "http" and path == self._root_path:  # addresses of the page are relative to `begin`
                await RedirectResponse(begin)(scope, receive, send)
                return
            path = path[len(self._root_path) :] if path.startswith(begin) else path
            # The router would remove it from a path that has it twice, which middleware would take for another route.
            root_path = "" if path.startswith(begin) else self._root_path
            scope = {**scope, "path": path, "root_path": root_path}
        await self._app(scope, receive, send)
