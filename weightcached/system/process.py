"""Processes: who they are, how they end, and the end that follows their parent's."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def signal_name(number: int) -> str:
    """E.g. SIGKILL; "signal 64" for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies; ends it if the parent is gone."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def prefer_for_oom_killer() -> None:
    """Offer this process to the kernel first when memory runs out: what it does can be done again,
    what the daemon and the engines hold cannot.
    """
    with open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
        score.write("800")
