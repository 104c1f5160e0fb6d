"""`pliant dash`: follow runs in the browser."""

import os
import socket
import sys
from pathlib import Path
from typing import Annotated

from pliant.cli import INTEGER

TOKEN_VARIABLE = "PLIANT_TOKEN"  # unset: a new random token each time


def dash(
    folder: Path = Path("runs"),
    *,
    host: str = "127.0.0.1",
    port: Annotated[int, INTEGER] = 8347,
    open: bool = False,
) -> None:
    """Serve a page that shows the runs of a folder and follows active ones.

    Example: pliant dash runs

    Example: pliant dash runs --host 0.0.0.0

    Args:
        folder: Folder that contains the runs; nothing outside it is read.
        host: Address to listen on; on any other than loopback, the page requires the printed token.
            Set PLIANT_TOKEN to choose the token.
        port: Port to listen on; 0 picks a free one.
        open: Also open the page in the browser.
    """
    from secrets import token_urlsafe

    from pliant.extras import require

    uvicorn = require("uvicorn", "dashboard")
    require("starlette", "dashboard")
    from pliant.cli.progress import print_line
    from pliant.dashboard.server import make_app
    from pliant.storage.run_dir import check_run_format, find_run_dirs

    if not 0 <= port <= 65535:
        raise ValueError(f"Expected a port from 0 to 65535, got {port}")
    is_local = host in ("127.0.0.1", "localhost", "::1")
    token = None if is_local else os.environ.get(TOKEN_VARIABLE) or token_urlsafe(24)
    app = make_app(folder, token, lambda: server.should_exit)
    for path in find_run_dirs(folder):
        check_run_format(path)
    with _bind_socket(host, port) as listening:
        url_host = f"[{host}]" if ":" in host else host
        address = f"http://{url_host}:{listening.getsockname()[1]}/"
        address += f"?token={token}" if token else ""
        print_line(address)
        sys.stderr.write("press Ctrl-C to stop\n")
        if open:
            import webbrowser

            webbrowser.open(address)
        config = uvicorn.Config(
            app, log_level="warning", timeout_graceful_shutdown=1, access_log=False
        )
        server = uvicorn.Server(config)
        server.run(sockets=[listening])


def _bind_socket(host: str, port: int) -> socket.socket:
    """Bind and listen, so that connections queue until the server starts."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        is_ipv6 = family == socket.AF_INET6
        return socket.create_server((host, port), family=family, dualstack_ipv6=is_ipv6)
    except socket.gaierror as error:
        raise ValueError(
            f"Expected an address of this machine, got {host!r} ({error.strerror})"
        ) from None
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ValueError(f"Cannot listen on {host} port {port}: {reason}") from None
