"""Processes: who they are, how they end, and the end that follows their parent's."""

from __future__ import annotations

import signal


def signal_name(number: int) -> str:
    """E.g. SIGKILL; "signal 64" for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
