"""The protocol between a service and its manager: sd_notify(3) and sd_listen_fds(3)."""

from __future__ import annotations

# The first descriptor that a manager passes (SD_LISTEN_FDS_START).
LISTEN_FDS_START = 3
