"""Who may come in: everyone on this machine, or whoever has the token; and what a page may load."""

from hmac import compare_digest
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "pliant_token"
LOCAL = ("localhost", "127.0.0.1", "[::1]", "::1")
HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        b"img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),  # the token must not leave by a link
    (b"cache-control", b"no-store"),
)


class Door:
    """Check each request before the application sees it.

    Without a token only names of this machine are answered: a page elsewhere whose own name was
    made to point here must not read what is here.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *HEADERS]
            await send(message)

        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if self._token is None:
            if _host(headers.get(b"host", "")) in LOCAL:
                await self._app(scope, receive, answer)
            else:
                await _refuse(answer, "this server answers to names of this machine only")
            return
        shown = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if shown and self._fits(shown) and scope["path"] == "/":
            await _welcome(answer, self._token)  # the token leaves the address bar
        elif self._fits(_bearer(headers)) or self._fits(_cookie(headers)):
            await self._app(scope, receive, answer)
        else:
            await _refuse(answer, "open the address with the token that `pliant dash` printed")

    def _fits(self, shown: str) -> bool:
        return self._token is not None and compare_digest(shown.encode(), self._token.encode())


def _host(header: str) -> str:
    name, colon, port = header.rpartition(":")
    return (name if colon and port.isdigit() else header).lower()


def _bearer(headers: dict[bytes, str]) -> str:
    kind, _, shown = headers.get(b"authorization", "").partition(" ")
    return shown if kind.lower() == "bearer" else ""


def _cookie(headers: dict[bytes, str]) -> str:
    try:
        found = SimpleCookie(headers.get(b"cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found else ""


async def _welcome(send: Send, token: str) -> None:
    cookie = f"{COOKIE}={token}; Path=/; HttpOnly; SameSite=Strict; Max-Age=2592000"
    headers = [(b"location", b"/"), (b"set-cookie", cookie.encode())]
    await send({"type": "http.response.start", "status": 303, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


async def _refuse(send: Send, why: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": f"403: {why}\n".encode()})
