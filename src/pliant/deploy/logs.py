"""Logs of servers and devices for operators: levels, JSON lines and files that rotate."""

import logging
import os
import time
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Literal

import msgspec

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]
MAX_LOG_BYTES, KEPT_LOGS = 10_000_000, 3


class JsonFormatter(logging.Formatter):
    """Format a record as one line of JSON with its time, level and message."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class PrivateRotatingHandler(RotatingFileHandler):
    """Write a log that only its owner can read."""

    def _open(self) -> TextIOWrapper:
        def open_private(name: str, flags: int) -> int:
            return os.open(name, flags, 0o600)

        return open(self.baseFilename, "a", encoding="utf-8", opener=open_private)


def set_up_logging(level: LogLevel, kind: LogFormat = "text", file: Path | None = None) -> None:
    """Send the log to a file that rotates, or to the standard error output."""
    handler: logging.Handler = logging.StreamHandler()
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        handler = PrivateRotatingHandler(file, maxBytes=MAX_LOG_BYTES, backupCount=KEPT_LOGS)
    text = "pliant: %(message)s" if file is None else "%(asctime)s %(levelname)s %(message)s"
    handler.setFormatter(JsonFormatter() if kind == "json" else logging.Formatter(text))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("pliant").setLevel(level.upper())
