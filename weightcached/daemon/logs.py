"""Logging of the daemon: one line per fact on standard error, with levels for journald."""

from __future__ import annotations

import logging
import os
import sys
import time

# sd-daemon(3): a line that begins with <N> is filed under syslog priority N.
_PRIORITY = {
    logging.DEBUG: 7,
    logging.INFO: 6,
    logging.WARNING: 4,
    logging.ERROR: 3,
    logging.CRITICAL: 2,
}
PEER_LOGGERS = ("weightcached.daemon.server", "weightcached.daemon.session")
LEVELS = ("debug", "info", "warning", "error")


class _JournalFormatter(logging.Formatter):
    """One prefix per line, so that a traceback's lines all keep their level."""

    def format(self, record: logging.LogRecord) -> str:
        prefix = f"<{_PRIORITY.get(record.levelno, 6)}>"
        return "\n".join(prefix + line for line in super().format(record).splitlines())


class Sparing(logging.Filter):
    """Lets through so many lines at once, then so many a second, errors always; says how many it
    left out.

    For lines that peers cause: a hostile one must fill neither disk nor journal.
    """

    def __init__(self, *, at_once: int = 500, per_second: float = 50.0) -> None:
        super().__init__()
        self._most = self._left = float(at_once)
        self._per_second = per_second
        self._seen_s = time.monotonic()
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            return True
        now_s = time.monotonic()
        self._left = min(self._most, self._left + (now_s - self._seen_s) * self._per_second)
        self._seen_s = now_s
        if self._left < 1:
            self._left_out += 1
            return False
        self._left -= 1
        if self._left_out:
            record.msg = f"({self._left_out} lines about peers were left out) {record.msg}"
            self._left_out = 0
        return True


_sparing = Sparing()


def configure(level: str) -> None:
    """Send everything from `level` (one of LEVELS) on to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    if "JOURNAL_STREAM" in os.environ or "INVOCATION_ID" in os.environ:
        handler.setFormatter(_JournalFormatter("%(message)s"))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in PEER_LOGGERS:
        logging.getLogger(name).addFilter(_sparing)
    # It reports which selector it uses, on every start.
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def printable(text: str, limit: int = 2000) -> str:
    """`text` on one line, without control characters: text of others must not forge log lines."""
    return "".join(c if c.isprintable() else "?" for c in text.strip())[:limit]
