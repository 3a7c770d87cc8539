"""IpcModelLoader: vLLM's load format `ipc_cache`, served by weightcached.

One decision per engine: at the first of memory query and load the plug-in attaches, keeps the
lease, and uses the same answer for both. All ranks map or none does. docs/fallback.md lists every
reason against mapping.
"""

from __future__ import annotations

import dataclasses
import time
import traceback
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from weightcache_loader import client, fallback
from weightcache_loader.options import LoaderOptions, parse_options
from weightcached.errors import (
    CacheConfigMismatchError,
    OutOfDeviceMemoryError,
    UnsupportedPlatformForIPCError,
    UnsupportedQuantForIPCError,
    WeightcachedError,
    WeightCacheUnavailableError,
)
from weightcached.model import bind
from weightcached.segments.api import Mapping, open_backend
from weightcached.system.paths import socket_path
from weightcached.vllm_compat import build, drafts, parked_start
from weightcached.vllm_compat.hooks import PostProcessing
from weightcached.vllm_compat.key import build_key

log = init_logger("vllm.weightcached")


class AttachOutcome(NamedTuple):
    """What this process found at its first question: an attachment, or the reason why there is
    none.
    """

    attachment: client.Attachment | None
    reason: WeightcachedError | None


class _Kept(NamedTuple):
    engine: str
    decision: AttachOutcome
    # So that its id names nothing else meanwhile.
    speculative_config: Any


# By role and until the load that uses it: vLLM makes a new loader object for every question.
_decisions: dict[str, _Kept] = {}


class IpcModelLoader(BaseModelLoader):  # type: ignore[misc]
    """Loads a model by mapping a weightcached generation; options as in options.LoaderOptions.

    Raises, with fallback off: WeightCacheUnavailableError, CacheConfigMismatchError,
    UnsupportedQuantForIPCError, UnsupportedPlatformForIPCError. With fallback on each of them is
    logged once and the model loads from disk.
    """

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self.options: LoaderOptions = parse_options(
            load_config.model_loader_extra_config, load_config.load_format
        )

    def get_external_weight_memory(self, vllm_config: Any) -> int:
        """Bytes of device memory that the mapped generations hold outside this process: the
        target's and the draft's.

        What is loaded from disk counts 0, as vLLM sees it grow itself; so does what each engine has
        of its own.
        """
        if parked_start.starts_parked(vllm_config):
            parked_start.check(vllm_config)
            parked_start.do_not_check_free_memory()
        total = self._external_bytes(vllm_config, vllm_config.model_config)
        if drafts.loads_here(vllm_config):
            config = drafts.draft_config(vllm_config)
            # vLLM asks once, the target's loader, for both; the draft's own is made later, from the
            # same options.
            if isinstance(
                loader := get_model_loader(drafts.load_config_of(config)), IpcModelLoader
            ):
                total += loader._external_bytes(
                    config, config.speculative_config.draft_model_config
                )
        if total:
            build.freeze_heap()
        return total

    def _external_bytes(self, vllm_config: Any, model_config: Any) -> int:
        self._take_role(vllm_config, model_config)
        if self.options.mode == "copy":
            return 0
        decision = self._decide(vllm_config, model_config)
        if decision.attachment is None:
            return 0
        return sum(s.nbytes for s in decision.attachment.tensor_index.segments if not s.private)

    def download_model(self, model_config: Any) -> None:
        """Fetch the checkpoint as the fallback would."""
        self._disk_loader().download_model(model_config)

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Copy the cache's tensors in place into a model that is built already, whatever `fallback`
        says.

        Raises IndexFormatError, before anything is written, when names, shapes or dtypes differ,
        and the reason when the cache cannot be used.
        """
        from vllm.config import get_current_vllm_config

        self._take_role(get_current_vllm_config(), model_config)
        attachment = self._attach(get_current_vllm_config(), model_config)
        try:
            mapping, device = self._map(attachment)
            try:
                storages = bind.Storages(attachment.tensor_index, mapping, device, copy=False)
                count = bind.copy_into(model, attachment.tensor_index, storages)
            finally:
                mapping.close()
        finally:
            attachment.close()
        log.info("copied %d tensors of %s into the model", count, attachment.ready.cache)

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        """The model, mapped from the cache or loaded from disk. Drafts without a cache load from
        disk.
        """
        self._take_role(vllm_config, model_config)
        if self.options.is_draft and not drafts.is_cached(vllm_config):
            return self._disk_loader().load_model(
                vllm_config=vllm_config, model_config=model_config, prefix=prefix
            )
        if not self.options.is_draft and (told := drafts.message(vllm_config)):
            log.info("%s", told)
        decision = self._decide(vllm_config, model_config)
        _decisions.pop(self.options.role, None)
        if decision.attachment is not None:
            result = self._map_model(vllm_config, model_config, prefix, decision.attachment)
            if isinstance(result, nn.Module):
                return result
            self._give_up(vllm_config, model_config, result)
        return self._disk_loader().load_model(
            vllm_config=vllm_config, model_config=model_config, prefix=prefix
        )

    def _take_role(self, vllm_config: Any, model_config: Any) -> None:
        # vLLM marks a draft's load where it knows the load format and the method as those of a
        # cached draft.
        if drafts.is_draft(vllm_config, model_config) and not self.options.is_draft:
            self.options = msgspec.structs.replace(self.options, is_draft=True)

    def _decide(self, vllm_config: Any, model_config: Any) -> AttachOutcome:
        """The decision of this engine. Raises its reason, with fallback off, and
        OutOfDeviceMemoryError.
        """
        role = self.options.role
        # vLLM makes a new configuration for each question about a draft; what says how to speculate
        # stays one object.
        engine_of = (
            id(vllm_config.speculative_config)
            if role == "draft"
            else getattr(vllm_config, "instance_id", "")
        )
        asking = f"{engine_of} {model_config.model}"
        kept = _decisions.pop(role, None)
        if kept is not None and kept.engine != asking:
            # An engine that ended between its questions; this one is another, perhaps with another
            # model.
            if kept.decision.attachment is not None:
                kept.decision.attachment.close()
            kept = None
        if kept is None:
            decision = self._first_decision(vllm_config, model_config)
            if decision.reason is not None:
                self._give_up(vllm_config, model_config, decision.reason)
            kept = _Kept(asking, decision, vllm_config.speculative_config)
        _decisions[role] = kept
        return kept.decision

    def _first_decision(self, vllm_config: Any, model_config: Any) -> AttachOutcome:
        try:
            attachment = self._attach(vllm_config, model_config)
        except Exception as e:
            # Whatever it is: the other ranks wait to hear of it.
            attachment, reason = None, reason_of(e)
        if all_ranks(attachment is not None, self.options.role):
            return AttachOutcome(attachment, None)
        if attachment is not None:
            attachment.close()
            reason = WeightCacheUnavailableError(
                "another rank of this engine cannot attach", code="another-rank"
            )
        return AttachOutcome(None, reason)

    def _attach(self, vllm_config: Any, model_config: Any) -> client.Attachment:
        check_supported(vllm_config, self.options)
        attachment = client.attach(
            self._socket_path(vllm_config),
            build_key(vllm_config, model_config, role=self.options.role),
            connect_timeout_s=self.options.connect_timeout_s,
            state_timeout_s=self.options.state_timeout_s,
            device=build.device_of_worker(vllm_config.parallel_config),
            identity=self.options.identity,
        )
        if (stage := build.stage_of_platform()) != attachment.tensor_index.stage:
            attachment.close()
            raise CacheConfigMismatchError(
                f"the cache holds {attachment.tensor_index.stage} weights, this engine needs {stage}"
            )
        return attachment

    def _socket_path(self, vllm_config: Any) -> Path:
        if self.options.socket_path:
            return Path(self.options.socket_path)
        return socket_path(
            build.device_of_worker(vllm_config.parallel_config), self.options.directory()
        )

    def _map(self, attachment: client.Attachment) -> tuple[Mapping, torch.device]:
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            backend, device = open_backend("cpu0"), torch.device("cpu")
        else:
            backend = open_backend(build.gpu_of_worker())
            device = torch.device("cuda", torch.cuda.current_device())
        return backend.map(
            attachment.fds, [s.nbytes for s in attachment.tensor_index.segments]
        ), device

    def _map_model(
        self, vllm_config: Any, model_config: Any, prefix: str, attachment: client.Attachment
    ) -> nn.Module | WeightcachedError:
        model: nn.Module | None = None
        reason: WeightcachedError | None = None
        with build.collection_paused(), build.isolated_build(vllm_config, keep=True) as building:
            try:
                model = self._build(vllm_config, model_config, prefix, attachment)
            except Exception as e:
                reason = reason_of(e)
            if not all_ranks(model is not None, self.options.role) and model is not None:
                model = None
                reason = WeightCacheUnavailableError(
                    "another rank of this engine failed to attach", code="another-rank"
                )
            building.keep = model is not None
        if model is None:
            attachment.close()
            assert reason is not None
            return reason
        if self.options.mode == "copy":
            client.release(attachment, timeout_s=self.options.connect_timeout_s)
        else:
            lease = client.LeaseKeeper(
                attachment.connection, self._socket_path(vllm_config), attachment.ready
            )
            # With the model: an engine that is shut down while its process lives on maps nothing
            # any more.
            weakref.finalize(model, lease.close).atexit = False
        return model.eval()

    def _build(
        self, vllm_config: Any, model_config: Any, prefix: str, attachment: client.Attachment
    ) -> nn.Module:
        index = attachment.tensor_index
        began = time.perf_counter()
        model = build.build_on_meta(vllm_config, model_config, prefix)
        built = time.perf_counter()
        if bind.skeleton_of(model) != index.skeleton:
            raise CacheConfigMismatchError(
                f"{attachment.ready.cache}: the layers that this engine builds differ from the cached ones in a name, "
                "shape, dtype or kernel class"
            )
        mapping, device = self._map(attachment)
        try:
            storages = bind.Storages(index, mapping, device, copy=self.options.mode == "copy")
            mapped = time.perf_counter()
            bind.Binder(model, index, storages).attach(
                PostProcessing(model_config, device, stage=index.stage)
            )
        finally:
            # The tensors keep what they need.
            mapping.close()
        done = time.perf_counter()
        log.info(
            "attached %s generation %d: %d tensors, %.2f GiB in %d segments (%s); "
            "build %.0f ms, map %.0f ms, bind %.0f ms",
            attachment.ready.cache, attachment.ready.generation, len(index.tensors), index.nbytes / 2**30,
            len(index.segments), self.options.mode, 1e3 * (built - began), 1e3 * (mapped - built),
            1e3 * (done - mapped),
        )  # fmt: skip
        return model

    def _give_up(self, vllm_config: Any, model_config: Any, reason: WeightcachedError) -> None:
        """Count and log the reason, once: from here on the engine loads from disk.

        Raises the reason, with fallback off, and OutOfDeviceMemoryError where a load from disk has
        no room.
        """
        fallback.counts[reason.code] += 1
        if not self.options.fallback:
            raise reason
        no_room = self._no_room(vllm_config, model_config, reason)
        if not all_ranks(no_room is None, self.options.role):
            raise no_room or OutOfDeviceMemoryError(
                f"the cache cannot be used ({reason}), and another rank has no room for a load from disk beside it",
                code="no-room",
            )
        _forget_frames(reason)
        log.warning("loading from disk (%s): %s", self.options.fallback_load_format, reason)
        self._report(vllm_config, reason)

    def _report(self, vllm_config: Any, reason: WeightcachedError) -> None:
        if reason.code == UnsupportedPlatformForIPCError.code:
            return
        try:
            fallback.report(self._socket_path(vllm_config), reason)
        except Exception as e:
            # Not worth an engine.
            log.debug("the daemon was not told: %s", e)

    def _no_room(
        self, vllm_config: Any, model_config: Any, reason: WeightcachedError
    ) -> OutOfDeviceMemoryError | None:
        if reason.code == UnsupportedPlatformForIPCError.code:
            return None
        try:
            device = build.device_of_worker(vllm_config.parallel_config)
            socket = self._socket_path(vllm_config)
            fallback.check_room(
                vllm_config, model_config, device, socket, self.options.fallback_load_format, reason
            )
        except OutOfDeviceMemoryError as e:
            return e
        except Exception as e:
            # Not worth an engine: the load itself says what is wrong.
            log.debug("no telling whether a load from disk has room: %s", e)
        return None

    def _disk_loader(self) -> Any:
        disk = dataclasses.replace(
            self.load_config,
            load_format=self.options.fallback_load_format,
            model_loader_extra_config=self.options.fallback_extra_config,
        )
        return get_model_loader(disk)


def reason_of(e: Exception) -> WeightcachedError:
    """The error as a reason for not mapping; one that nobody foresaw is logged with its
    traceback.
    """
    if isinstance(e, WeightcachedError):
        return e
    if not isinstance(e, OSError):
        log.error("attaching failed", exc_info=e)
    return WeightCacheUnavailableError(
        f"attaching failed: {type(e).__name__}: {e}", code="attach-failed"
    )


def _forget_frames(e: BaseException | None) -> None:
    # Their locals are a half-built model and what it maps, which would stay for as long as the load
    # from disk takes.
    while e is not None:
        traceback.clear_frames(e.__traceback__)
        e = e.__cause__ or e.__context__


def check_supported(vllm_config: Any, options: LoaderOptions) -> None:
    """Refuse what a mapped cache cannot serve. Raises UnsupportedPlatformForIPCError,
    UnsupportedQuantForIPCError.
    """
    if not build.stage_of_platform():
        from vllm.platforms import current_platform

        raise UnsupportedPlatformForIPCError(
            f"platform {current_platform.device_name} has no segment backend"
        )
    parallel, offload = vllm_config.parallel_config, getattr(vllm_config, "offload_config", None)
    for name in ("enable_eplb", "enable_elastic_ep"):
        if getattr(parallel, name, False):
            raise UnsupportedQuantForIPCError(
                f"{name} moves experts while serving: leave it out to use the cache", code="eplb"
            )
    if options.mode == "zero_copy" and getattr(
        vllm_config.model_config, "enable_sleep_mode", False
    ):
        raise UnsupportedPlatformForIPCError(
            "enable_sleep_mode frees weights that others map: use mode copy", code="sleep-mode"
        )
    # Where vLLM keeps them has moved: the cache's configuration had the first.
    offloaded = {
        "cpu_offload_gb": getattr(vllm_config.cache_config, "cpu_offload_gb", 0)
        or getattr(getattr(offload, "uva", None), "cpu_offload_gb", 0),
        "offload_group_size": getattr(getattr(offload, "prefetch", None), "offload_group_size", 0),
    }
    for name, value in offloaded.items():
        if value:
            raise UnsupportedPlatformForIPCError(
                f"{name} {value} moves weights out of device memory: set it to 0 to use the cache",
                code="cpu-offload",
            )


def all_ranks(ok: bool, role: str) -> bool:
    """Whether every rank says yes; one small collective, none where the rank is alone."""
    from vllm.distributed import get_tp_group, get_world_group

    # Only the last pipeline stage loads a draft, so the world would wait for ranks that never come.
    group = get_tp_group() if role == "draft" else get_world_group()
    if group.world_size == 1:
        return ok
    flag = torch.tensor([int(ok)], dtype=torch.int32)
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(flag.item())
