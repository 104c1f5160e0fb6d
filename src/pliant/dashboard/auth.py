"""Authenticate requests, by local host name or by token, and restrict what a page may load."""

from hmac import compare_digest
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "pliant_token"
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]", "::1")
SECURITY_HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        b"img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),  # a link must not leak the token
    (b"cache-control", b"no-store"),
)


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
                message["headers"] = [*message.get("headers", ()), *SECURITY_HEADERS]
            await send(message)

        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if self._token is None:
            if _parse_host(headers.get(b"host", "")) in LOCAL_HOSTS:
                await self._app(scope, receive, send_with_headers)
            else:
                await _send_forbidden(send_with_headers, "only local host names are served")
            return
        query_token = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        header_tokens = (_get_bearer_token(headers), _get_cookie_token(headers))
        if query_token and self._is_valid(query_token) and scope["path"] == "/":
            # removes the token from the address bar
            await _redirect_with_cookie(send_with_headers, self._token)
        elif any(map(self._is_valid, header_tokens)):
            await self._app(scope, receive, send_with_headers)
        else:
            await _send_forbidden(
                send_with_headers, "open the address with the token that `pliant dash` printed"
            )

    def _is_valid(self, token: str) -> bool:
        return self._token is not None and compare_digest(token.encode(), self._token.encode())


def _parse_host(header: str) -> str:
    name, colon, port = header.rpartition(":")
    return (name if colon and port.isdigit() else header).lower()


def _get_bearer_token(headers: dict[bytes, str]) -> str:
    scheme, _, token = headers.get(b"authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" else ""


def _get_cookie_token(headers: dict[bytes, str]) -> str:
    try:
        cookie = SimpleCookie(headers.get(b"cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return cookie.value if cookie else ""


async def _redirect_with_cookie(send: Send, token: str) -> None:
    cookie = f"{COOKIE}={token}; Path=/; HttpOnly; SameSite=Strict; Max-Age=2592000"
    headers = [(b"location", b"/"), (b"set-cookie", cookie.encode())]
    await send({"type": "http.response.start", "status": 303, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


async def _send_forbidden(send: Send, reason: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": f"403: {reason}\n".encode()})
