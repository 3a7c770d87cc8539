"""Every error that leaves a module, with its wire code and exit status.

`code` travels in messages and metrics and never changes; the text may. A command ends with
`exit_status`. 78 (EX_CONFIG) marks a fault that a restart does not cure: the unit lists it in
RestartPreventExitStatus=.
"""

from __future__ import annotations

from typing import Literal

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_NO_DAEMON = 3
EXIT_BUSY = 75
EXIT_CONFIG = 78


# Refusals of the daemon that need no class of their own.
Refusal = Literal[
    "busy",
    "evicted",
    "generation-gone",
    "in-use",
    "loading",
    "no-lease",
    "peer",
    "protocol-version",
    "unknown-cache",
]
# Causes that are named more closely than by the class of their error.
Cause = Literal[
    "absent",
    "another-rank",
    "attach-failed",
    "connection-lost",
    "cpu-offload",
    "eplb",
    "failed",
    "no-daemon",
    "no-room",
    "not-live",
    "protocol-version",
    "refused",
    "released",
    "stalled",
    "still-loading",
    "timeout",
    "unreachable",
    "weight-transfer",
    "wrong-device",
]


class WeightcachedError(Exception):
    """Base of all errors here. `str()` is one complete message for a person.

    Each class has a code; `code` names a cause more closely, for counters.
    """

    code: str = "error"
    exit_status = EXIT_FAILURE

    def __init__(self, message: str = "", *, code: Cause | None = None) -> None:
        super().__init__(message)
        if code:
            self.code = code


class ManifestError(WeightcachedError):
    """The model manifest is wrong. The operator edits it; the text names file, line and key."""

    code = "manifest"
    exit_status = EXIT_CONFIG


class DeviceError(WeightcachedError):
    """A device name is malformed, or no such device is in this machine."""

    code = "device"
    exit_status = EXIT_CONFIG


class CheckpointError(WeightcachedError):
    """Checkpoint files are missing, unreadable or malformed. The operator names another one."""

    code = "checkpoint"
    exit_status = EXIT_CONFIG


class CheckpointMissingError(CheckpointError):
    """The checkpoint is not there. A mount may be late: tried again, it may be."""

    code = "checkpoint-missing"
    exit_status = EXIT_FAILURE


class SnapshotError(WeightcachedError):
    """A snapshot cannot be written, or is damaged. The weights are loaded instead."""

    code = "snapshot"


class RuntimePathError(WeightcachedError):
    """The runtime directory, socket or lock has the wrong owner, mode, kind or length."""

    code = "runtime-path"
    exit_status = EXIT_CONFIG


class HomeError(WeightcachedError):
    """This user has no home directory, and a needed file would be there."""

    code = "home"
    exit_status = EXIT_CONFIG


class DeviceBusyError(WeightcachedError):
    """Another daemon holds this device's lock."""

    code = "device-busy"
    exit_status = EXIT_BUSY


class LayoutError(WeightcachedError):
    """Tensors cannot be laid out in segments as asked; a fault in the caller."""

    code = "layout"


class SegmentError(WeightcachedError):
    """A segment could not be created, adopted or mapped. The text names the failed call."""

    code = "segment"


class OutOfDeviceMemoryError(SegmentError):
    """The device has too little free memory. The text says needed, free, and who holds it."""

    code = "out-of-memory"


class IndexFormatError(WeightcachedError):
    """A tensor index does not decode, has another format version, or contradicts its segments."""

    code = "index-format"


class ProtocolError(WeightcachedError):
    """A peer broke the protocol; its connection is closed, nobody else is affected."""

    code = "protocol"


class LoadError(WeightcachedError):
    """A loader child ended without a complete generation."""

    code = "load-failed"


class WeightCacheUnavailableError(WeightcachedError):
    """No daemon can serve this engine now. With fallback the engine loads from disk."""

    code = "unavailable"
    exit_status = EXIT_NO_DAEMON


class CacheConfigMismatchError(WeightcachedError):
    """The cache was made for another key. With fallback the engine loads from disk."""

    code = "key-mismatch"


class UnsupportedQuantForIPCError(WeightcachedError):
    """A layer's quantization could not be attached. Names module, method and attribute."""

    code = "unsupported-quantization"
    exit_status = EXIT_CONFIG


class UnsupportedPlatformForIPCError(WeightcachedError):
    """The engine's platform has no segment backend."""

    code = "unsupported-platform"
    exit_status = EXIT_CONFIG


class SharedWeightsError(WeightcachedError):
    """A request would write into weights that other engines map. Nothing was written."""

    code = "shared-weights"
    exit_status = EXIT_CONFIG


class EngineError(WeightcachedError):
    """An engine failed to carry out a command, or does not answer. The text is for people."""

    code = "engine"

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


class PlacementError(WeightcachedError):
    """The engine arguments cannot be laid out on this node. `key` is the argument to change."""

    code = "placement"
    exit_status = EXIT_USAGE

    def __init__(self, message: str = "", *, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class ServiceBusyError(WeightcachedError):
    """Another supervisor keeps this service."""

    code = "service-busy"
    exit_status = EXIT_BUSY


class ListenError(WeightcachedError):
    """The public address cannot be had. The operator frees it, or changes the manifest."""

    code = "listen"
    exit_status = EXIT_CONFIG


class ArgumentError(WeightcachedError):
    """vLLM does not take these arguments. The operator changes the manifest."""

    code = "engine-argument"
    exit_status = EXIT_CONFIG


class UnitError(WeightcachedError):
    """systemd could not carry out the job, or the unit ended in another state."""

    code = "unit"


class UnknownCacheError(WeightcachedError):
    """No daemon holds a cache of that name."""

    code = "unknown-cache"


class ExporterError(WeightcachedError):
    """The endpoint cannot listen there. The operator chooses another address or port."""

    code = "exporter"


class InstallError(WeightcachedError):
    """The files cannot be installed; the text names the obstacle."""

    code = "install"


class PreloadError(WeightcachedError):
    """The command line cannot be carried out. The user changes it."""

    code = "preload"
    exit_status = EXIT_USAGE
