"""Authenticate requests, by local host name or by token, and restrict what a page may load."""

from hmac import compare_digest

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "pliant_token"
COOKIE_SECONDS = 30 * 24 * 3600
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]", "::1")
SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",  # a link must not leak the token
    "cache-control": "no-store",
}


class AuthMiddleware:
    """Check each request before the application sees it.

    Without a token only local host names are served, to prevent DNS rebinding: a foreign page whose
    name resolves to this machine must not read its data.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        respond = self._select_response(Request(scope))
        await respond(scope, receive, send_with_headers)

    def _select_response(self, request: Request) -> ASGIApp:
        """Return the application for a request that may see it, else a redirect or a refusal."""
        if self._token is None:
            if _parse_host(request.headers.get("host", "")) in LOCAL_HOSTS:
                return self._app
            return _refuse("only local host names are served")
        if request.scope["path"] == "/" and self._is_valid(request.query_params.get("token", "")):
            response = RedirectResponse("/", 303)  # removes the token from the address bar
            response.set_cookie(
                COOKIE, self._token, max_age=COOKIE_SECONDS, httponly=True, samesite="strict"
            )
            return response
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        header_tokens = (bearer if scheme.lower() == "bearer" else "", request.cookies.get(COOKIE))
        if any(token and self._is_valid(token) for token in header_tokens):
            return self._app
        return _refuse("open the address with the token that `pliant dash` printed")

    def _is_valid(self, token: str) -> bool:
        return self._token is not None and compare_digest(token.encode(), self._token.encode())


def _parse_host(header: str) -> str:
    name, colon, port = header.rpartition(":")
    return (name if colon and port.isdigit() else header).lower()


def _refuse(reason: str) -> PlainTextResponse:
    return PlainTextResponse(f"403: {reason}\n", 403)
