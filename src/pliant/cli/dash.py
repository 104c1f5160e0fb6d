"""`pliant dash`: runs in the browser, while they go on."""

import os
import socket
import sys
from pathlib import Path

TOKEN = "PLIANT_TOKEN"  # chosen by the user; another one each time otherwise


def dash(
    folder: Path = Path("runs"), *, host: str = "127.0.0.1", port: int = 8347, open: bool = False
) -> None:
    """Serve a page that shows the runs of a folder and follows those that go on.

    Example: pliant dash runs

    Example: pliant dash runs --host 0.0.0.0

    Parameters
    ----------
    folder
        Folder that holds the folders of runs; nothing outside it is read.
    host
        Address to listen at; any other than this machine's own needs the token that is printed.
        Set PLIANT_TOKEN to choose the token.
    port
        Port to listen at; 0 takes a free one.
    open
        Open the page in the browser too.
    """
    from secrets import token_urlsafe

    from pliant.extras import need

    uvicorn = need("uvicorn", "dashboard")
    need("starlette", "dashboard")
    from pliant.dashboard.server import application

    if not 0 <= port <= 65535:
        raise ValueError(f"Expected a port from 0 to 65535, got {port}")
    is_local = host in ("127.0.0.1", "localhost", "::1")
    token = None if is_local else os.environ.get(TOKEN) or token_urlsafe(24)
    app = application(folder, token, lambda: server.should_exit)
    with _bound(host, port) as listening:
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{listening.getsockname()[1]}/"
        address += f"?token={token}" if token else ""
        sys.stdout.write(f"{address}\n")
        sys.stdout.flush()
        sys.stderr.write("Ctrl-C ends it\n")
        if open:
            import webbrowser

            webbrowser.open(address)
        config = uvicorn.Config(
            app, log_level="warning", timeout_graceful_shutdown=1, access_log=False
        )
        server = uvicorn.Server(config)
        server.run(sockets=[listening])


def _bound(host: str, port: int) -> socket.socket:
    """Bind before anything is said: a port that is taken is told in one line."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ValueError(f"Expected an address of this machine, got {host!r} ({error})") from None
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen()  # whoever opens the address at once waits for the first answer
    except (OSError, OverflowError) as error:
        listening.close()
        raise ValueError(f"Cannot listen at {host} port {port}: {error}") from None
    return listening
