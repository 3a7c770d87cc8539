"""Logging of the daemon: one line per fact on standard error, in the form that journald reads levels from."""

from __future__ import annotations

import logging
import os
import sys

# sd-daemon(3): a line that begins with <N> is filed under syslog priority N.
_PRIORITY = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
LEVELS = ("debug", "info", "warning", "error")


class _JournalFormatter(logging.Formatter):
    """One prefix per line, so that a traceback's lines all keep their level."""

    def format(self, record: logging.LogRecord) -> str:
        prefix = f"<{_PRIORITY.get(record.levelno, 6)}>"
        return "\n".join(prefix + line for line in super().format(record).splitlines())


def configure(level: str) -> None:
    """Send everything from `level` (one of LEVELS) on to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    if "JOURNAL_STREAM" in os.environ or "INVOCATION_ID" in os.environ:
        handler.setFormatter(_JournalFormatter("%(message)s"))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # It reports which selector it uses, on every start.
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def printable(text: str, limit: int = 2000) -> str:
    """`text` on one line, without control characters: what others wrote must not forge log lines."""
    return "".join(c if c.isprintable() else "?" for c in text.strip())[:limit]
