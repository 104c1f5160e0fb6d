"""Run Flower's SuperLink behind a guard, and limit what others can make it log.

The process is `python -m pliant.deploy.flower.superlink REPLY_LIMIT_FILE KEYS OPTIONS`, with the
secret of its control routes in the environment; without keys, KEYS is empty.
"""

import logging
import os
import sys
from pathlib import Path
from typing import Any

from pliant.deploy.flower.guard import GuardMiddleware
from pliant.deploy.security.rate_limit import RateLimit
from pliant.deploy.settings import CONTROL_SECRET_VARIABLE

LINES_PER_SECOND, LINE_BURST = 5.0, 200.0
LOGGERS = ("flwr", "uvicorn.access", "uvicorn.error", "uvicorn")


class LineLimit(logging.Filter):
    """Drop lines beyond a rate, as strangers can cause any number of them."""

    def __init__(self) -> None:
        super().__init__()
        self._rates, self._dropped = RateLimit(LINES_PER_SECOND, LINE_BURST), 0

    def filter(self, record: logging.LogRecord) -> bool:
        if not self._rates.allow("all"):
            self._dropped += 1
            return False
        if self._dropped:
            record.msg, record.args = f"{record.getMessage()} ({self._dropped} lines dropped)", ()
            self._dropped = 0
        return True


def main() -> None:
    import flwr.superlink.main as superlink
    from flwr.superlink.cli import flower_superlink

    reply_limit, keys = Path(sys.argv.pop(1)), sys.argv.pop(1)
    secret = os.environ.pop(CONTROL_SECRET_VARIABLE)
    create_app = superlink.create_app

    def create_guarded_app(*arguments: Any) -> Any:
        app = create_app(*arguments)
        app.add_middleware(
            GuardMiddleware,
            state=app.state,
            secret=secret,
            reply_limit=reply_limit,
            keys=Path(keys) if keys else None,
        )
        return app

    superlink.create_app = create_guarded_app
    limit = LineLimit()
    for name in LOGGERS:
        logging.getLogger(name).addFilter(limit)
    flower_superlink()


if __name__ == "__main__":
    main()
