"""IpcModelLoader: vLLM's load format `ipc_cache`, served by weightcached.

One decision per engine: at the first of memory query and load the plug-in attaches, keeps the
lease, and uses the same answer for both. All ranks map or none does. docs/fallback.md lists every
reason against mapping.
"""

from __future__ import annotations

import dataclasses
import functools
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import vllm
from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from weightcache_loader import budget, client, fallback, holds, reload, swap
from weightcache_loader.options import LoaderOptions, parse_options
from weightcached.errors import (
    CacheConfigMismatchError,
    OutOfDeviceMemoryError,
    UnsupportedPlatformForIPCError,
    UnsupportedQuantForIPCError,
    WeightcachedError,
    WeightCacheUnavailableError,
)
from weightcached.model import bind, mapped
from weightcached.segments.api import open_backend
from weightcached.segments.cuda import CudaMapping
from weightcached.segments.host import HostMapping
from weightcached.system.paths import socket_path
from weightcached.vllm_compat import (
    build,
    drafts,
    first_start,
    live,
    parked_start,
    room,
    startup_plan,
)
from weightcached.vllm_compat import worker as vllm_worker
from weightcached.vllm_compat.build import all_ranks
from weightcached.vllm_compat.hooks import PostProcessing
from weightcached.vllm_compat.key import build_key, with_checkpoint_as_now
from weightcached.vllm_compat.versions import warn_of_unseen
from weightcached.wire.resident import Held

log = init_logger("vllm.weightcached")

ChangeableMapping = CudaMapping | HostMapping


class AttachOutcome(NamedTuple):
    """The result of this process's first question: an attachment, or the reason against it."""

    attachment: client.Attachment | None
    reason: WeightcachedError | None
    # Least device memory of a load from disk, if it was computed.
    needed: int = 0


class _Kept(NamedTuple):
    engine: str
    decision: AttachOutcome
    # Kept so that no other object gets its id.
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
        # Once more: the engine core may have been imported after the plug-ins were loaded.
        parked_start.install()
        live.install()
        vllm_worker.install(
            reload.reload_weights,
            on_started=holds.end,
            memory_kept=holds.for_a_moment,
            prepare_swap=swap.prepare_swap,
            swap=swap.swap,
        )

    def get_external_weight_memory(self, vllm_config: Any) -> int:
        """Bytes of the utilization's budget that the engine may not use itself
        (budget.external_bytes): its mapped weights, target and draft, and the daemon's other caches
        as far as the device has no room for them. Weights from disk and private memory count 0,
        because vLLM measures them itself. Raises OutOfDeviceMemoryError if there is no room even
        so.
        """
        if parked_start.starts_parked(vllm_config):
            parked_start.check(vllm_config)
            parked_start.do_not_check_free_memory()
        found = [self._decide_for_role(vllm_config, vllm_config.model_config)]
        if drafts.loads_here(vllm_config):
            config = drafts.draft_config(vllm_config)
            # vLLM asks once, the target's loader, for both; the draft's own is made later, from the
            # same options.
            if isinstance(
                loader := get_model_loader(drafts.load_config_of(config)), IpcModelLoader
            ):
                found.append(
                    loader._decide_for_role(config, config.speculative_config.draft_model_config)
                )
        if any(decision.attachment is not None for decision in found):
            build.freeze_heap()
        self._hold_loads(vllm_config, [outcome.reason for outcome in found])
        external = self._external_bytes(vllm_config, found)
        sources = [self._source(decision) for decision in found]
        startup_plan.note(vllm_config.cache_config.gpu_memory_utilization, external, sources)
        memory = build.device_memory()
        if memory is not None and not parked_start.starts_parked(vllm_config):
            budget_now = first_start.Budget(
                free_bytes=memory[0], external_bytes=external, sources=sources
            )
            first_start.settle(vllm_config, budget_now)
        return external

    def _hold_loads(self, vllm_config: Any, reasons: Sequence[WeightcachedError | None]) -> None:
        """From now on, until the engine has started, the daemon leaves the device's memory as it is."""
        codes = {reason.code for reason in reasons if reason is not None}
        if codes & fallback.NOBODY_TO_ASK or codes & {"still-loading", "stalled"}:
            # Nobody there, or one that was waited for in vain before.
            holds.end()
            return
        holds.begin(
            self._socket_path(vllm_config),
            connect_timeout_s=self.options.connect_timeout_s,
            state_timeout_s=self.options.state_timeout_s,
        )

    def _decide_for_role(self, vllm_config: Any, model_config: Any) -> AttachOutcome:
        self._take_role(vllm_config, model_config)
        return self._decide(vllm_config, model_config)

    def _source(self, decision: AttachOutcome) -> str:
        return self.options.mode if decision.attachment is not None else "disk"

    def _own_bytes(self, decision: AttachOutcome) -> int:
        """Bytes that the engine maps instead of allocating them, or copies and gives back."""
        if decision.attachment is None:
            return 0
        if self.options.mode == "copy":
            return decision.attachment.ready.nbytes
        return sum(s.nbytes for s in decision.attachment.tensor_index.segments if not s.private)

    def _external_bytes(self, vllm_config: Any, found: Sequence[AttachOutcome]) -> int:
        own = sum(self._own_bytes(decision) for decision in found)
        memory = build.device_memory()
        if memory is None:
            # vLLM has no memory budget there.
            return own
        reasons = [decision.reason for decision in found if decision.reason is not None]
        caches = self._resident(vllm_config, reasons)
        # Not by own bytes: a generation also holds its private segment, which engines copy.
        mapped = {_generation_of(decision) for decision in found}
        reserved = budget.reserved_bytes(caches)
        others = sum(c.nbytes for c in caches if (c.cache, c.generation) not in mapped) - reserved
        if parked_start.starts_parked(vllm_config):
            # Another engine has the device's memory now, and will give it back first.
            return own + others + reserved
        free, total = memory
        device = budget.DeviceBudget(total, free, vllm_config.cache_config.gpu_memory_utilization)
        external = budget.external_bytes(device, own=own, others=others, reserved=reserved)
        self._tell_cost(vllm_config, found, caches, device, own, external)
        return external

    def _tell_cost(
        self,
        vllm_config: Any,
        found: Sequence[AttachOutcome],
        caches: Sequence[Held],
        device: budget.DeviceBudget,
        own: int,
        external: int,
    ) -> None:
        """Log the cost of others' caches.

        Raises OutOfDeviceMemoryError if vLLM would refuse, or weights from disk provably do not
        fit.
        """
        mapped = {_generation_of(decision) for decision in found}
        due = [c for c in caches if (c.cache, c.generation) not in mapped] or list(caches)
        left = budget.engine_bytes(device, external)
        needed = sum(decision.needed for decision in found)
        fixed = vllm_config.cache_config.kv_cache_memory_bytes is not None
        if caches and (not budget.starts(device, external) or (needed > left and not fixed)):
            raise OutOfDeviceMemoryError(
                budget.no_room(device, due, own=own, left=left, needed=needed), code="no-room"
            )
        if external > own:
            log.warning("%s", budget.cost(device, due, external - own))

    def _resident(self, vllm_config: Any, reasons: Sequence[WeightcachedError]) -> list[Held]:
        try:
            return fallback.resident(self._socket_path(vllm_config), reasons)
        except WeightcachedError as e:
            log.debug("cannot tell how much memory the daemon holds: %s", e)
            return []

    def download_model(self, model_config: Any) -> None:
        """Fetch the checkpoint as the fallback would."""
        self._disk_loader().download_model(model_config)

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Copy the cache's tensors in place into an existing model; ignores `fallback`.

        Raises IndexFormatError, before anything is written, when names, shapes or dtypes differ,
        and the reason if the cache cannot be used.
        """
        from vllm.config import get_current_vllm_config

        self._take_role(get_current_vllm_config(), model_config)
        attachment = self._attach(get_current_vllm_config(), model_config)
        try:
            self._copy_into(model, attachment)
        finally:
            attachment.close()

    def _copy_into(
        self, model: nn.Module, attachment: client.Attachment, *, attributes: bool = False
    ) -> None:
        mapping, device = self._map(attachment)
        try:
            storages = bind.Storages(attachment.tensor_index, mapping, device, copy=False)
            count = bind.copy_into(model, attachment.tensor_index, storages, attributes=attributes)
        finally:
            mapping.close()
        log.info("copied %d tensors of %s into the model", count, attachment.ready.cache)

    def get_all_weights(self, model_config: Any, model: nn.Module) -> Any:
        """The fallback's weights from disk, by name, for vLLM's reload.

        Raises NotImplementedError if that format cannot read them again.
        """
        disk = self._disk_loader()
        if not hasattr(disk, "get_all_weights"):
            raise NotImplementedError(
                f"load format {self.options.fallback_load_format!r} cannot read weights again"
            )
        return disk.get_all_weights(model_config, model)

    def copy_again(self, vllm_config: Any, model_config: Any, model: nn.Module) -> bool:
        """In copy mode, fill a model from the cache after sleep(2) discarded its weights.

        False if the weights must come from disk.
        """
        if self.options.mode != "copy" or build.stage_of_platform() != "processed":
            # Loaded weights differ from those of a model after post-processing.
            return False
        attachment, reason = None, None
        try:
            attachment = self._attach(vllm_config, model_config)
        except Exception as e:
            reason = reason_of(e)
        if not all_ranks(attachment is not None, self.options.role):
            if attachment is not None:
                attachment.close()
            log.info("the weights come from disk again: %s", reason or "another rank needs it")
            return False
        assert attachment is not None
        self._copy_into(model, attachment, attributes=True)
        client.release(attachment, timeout_s=self.options.connect_timeout_s)
        return True

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        """The model, mapped from the cache or loaded from disk, as drafts without a cache are."""
        self._take_role(vllm_config, model_config)
        if self.options.is_draft and not drafts.is_cached(vllm_config):
            return self._disk_loader().load_model(
                vllm_config=vllm_config, model_config=model_config, prefix=prefix
            )
        if not self.options.is_draft and (told := drafts.message(vllm_config)):
            log.info("%s", told)
        decision = self._decide(vllm_config, model_config)
        _decisions.pop(self.options.role, None)
        if not holds.was_asked():
            # A worker of the CPU, which does not ask for the memory before.
            self._hold_loads(vllm_config, [decision.reason])
        if decision.attachment is not None:
            result = self._map_model(vllm_config, model_config, prefix, decision.attachment)
            if isinstance(result, nn.Module):
                return result
            self._give_up(vllm_config, model_config, result)
            startup_plan.changed("disk")
            first_start.changed()
        return self._disk_loader().load_model(
            vllm_config=vllm_config, model_config=model_config, prefix=prefix
        )

    def _take_role(self, vllm_config: Any, model_config: Any) -> None:
        # vLLM marks a draft's load if load format and method are those of a cached draft.
        if drafts.is_draft(vllm_config, model_config) and not self.options.is_draft:
            self.options = msgspec.structs.replace(self.options, is_draft=True)

    def _decide(self, vllm_config: Any, model_config: Any) -> AttachOutcome:
        """The decision of this engine. Raises the reason if fallback is off; OutOfDeviceMemoryError."""
        role = self.options.role
        # vLLM makes a new configuration for each question about a draft; only its
        # speculative_config stays one object.
        engine_of = (
            id(vllm_config.speculative_config)
            if role == "draft"
            else getattr(vllm_config, "instance_id", "")
        )
        asking = f"{engine_of} {model_config.model}"
        kept = _decisions.pop(role, None)
        if kept is not None and kept.engine != asking:
            # The earlier engine ended between its questions; this is another one, perhaps with
            # another model.
            if kept.decision.attachment is not None:
                kept.decision.attachment.close()
            kept = None
        if kept is None:
            decision = self._first_decision(vllm_config, model_config)
            if decision.reason is not None:
                needed = self._give_up(vllm_config, model_config, decision.reason)
                decision = decision._replace(needed=needed)
            kept = _Kept(asking, decision, vllm_config.speculative_config)
        _decisions[role] = kept
        return kept.decision

    def _first_decision(self, vllm_config: Any, model_config: Any) -> AttachOutcome:
        warn_of_unseen(log, vllm.__version__)
        try:
            attachment = self._attach(vllm_config, model_config)
        except Exception as e:
            # Any error: the other ranks are waiting for this one.
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
        key = build_key(vllm_config, model_config, role=self.options.role)
        socket = self._socket_path(vllm_config)
        attachment = self._how_to_attach(vllm_config)(
            key, patient=not self.options.fallback or fallback.may_come_back(socket)
        )
        if (stage := build.stage_of_platform()) != attachment.tensor_index.stage:
            attachment.close()
            raise CacheConfigMismatchError(
                f"the cache holds {attachment.tensor_index.stage} weights, this engine needs {stage}"
            )
        return attachment

    def _how_to_attach(self, vllm_config: Any) -> Callable[..., client.Attachment]:
        """Attaches by a key, without the engine's configuration."""
        return functools.partial(
            client.attach,
            self._socket_path(vllm_config),
            connect_timeout_s=self.options.connect_timeout_s,
            state_timeout_s=self.options.state_timeout_s,
            device=build.device_of_worker(vllm_config.parallel_config),
            identity=self.options.identity,
        )

    def _socket_path(self, vllm_config: Any) -> Path:
        if self.options.socket_path:
            return Path(self.options.socket_path)
        return socket_path(
            build.device_of_worker(vllm_config.parallel_config), self.options.directory()
        )

    def _map(self, attachment: client.Attachment) -> tuple[ChangeableMapping, torch.device]:
        """The segments mapped, and their device. The attachment keeps its descriptors."""
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            backend, device = open_backend("cpu0"), torch.device("cpu")
        else:
            backend = open_backend(build.gpu_of_worker())
            device = torch.device("cuda", torch.cuda.current_device())
        fds = [fd.dup() for fd in attachment.fds]
        mapping = backend.map(fds, [s.nbytes for s in attachment.tensor_index.segments])
        assert isinstance(mapping, CudaMapping | HostMapping)
        return mapping, device

    def _map_model(
        self, vllm_config: Any, model_config: Any, prefix: str, attachment: client.Attachment
    ) -> nn.Module | WeightcachedError:
        model: nn.Module | None = None
        mapping: ChangeableMapping | None = None
        storages: bind.Storages | None = None
        reason: WeightcachedError | None = None
        with build.collection_paused(), build.isolated_build(vllm_config, keep=True) as building:
            try:
                model, mapping, storages = self._build(
                    vllm_config, model_config, prefix, attachment
                )
            except Exception as e:
                reason = reason_of(e)
            if not all_ranks(model is not None, self.options.role) and model is not None:
                model = storages = mapping = None
                reason = WeightCacheUnavailableError(
                    "another rank of this engine failed to attach", code="another-rank"
                )
            building.keep = model is not None
        if model is None or storages is None or mapping is None:
            attachment.close()
            assert reason is not None
            return reason
        if self.options.mode == "copy":
            client.release(attachment, timeout_s=self.options.connect_timeout_s)
        else:
            self._keep(vllm_config, model_config, model, attachment, mapping, storages)
        return model.eval()

    def _keep(
        self,
        vllm_config: Any,
        model_config: Any,
        model: nn.Module,
        attachment: client.Attachment,
        mapping: ChangeableMapping,
        storages: bind.Storages,
    ) -> None:
        """Keep the lease as long as the model lives, and let it sleep and take new weights."""
        path, attach = self._socket_path(vllm_config), self._how_to_attach(vllm_config)
        cached = attachment.tensor_index.key
        key = with_checkpoint_as_now(cached, vllm_config, model_config)

        def attach_newest(wait: bool) -> client.Attachment:
            newest = functools.partial(attach, cached, cache=attachment.ready.cache)
            return client.patiently(newest) if wait else newest(state_timeout_s=0)

        def lease(
            held: mapped.MappedAttachment, on_unmap: Callable[[], bool]
        ) -> client.LeaseKeeper:
            assert isinstance(held, client.Attachment)
            return client.LeaseKeeper(held.connection, path, held.ready, on_unmap=on_unmap)

        mapped.keep(
            model,
            mapped.MappedModel(
                attachment,
                mapping,
                storages,
                attach=lambda: client.patiently(lambda: attach(key())),
                attach_newest=attach_newest,
                lease=lease,
                rebind=vllm_worker.rebinder(model, vllm_config, model_config, storages),
            ),
        )
        vllm_worker.refuse_writes(model)

    def _build(
        self, vllm_config: Any, model_config: Any, prefix: str, attachment: client.Attachment
    ) -> tuple[nn.Module, ChangeableMapping, bind.Storages]:
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
        except BaseException:
            mapping.close()
            raise
        vllm_worker.settle_for_reloads(model, device)
        if self.options.mode == "copy":
            # The tensors have memory of their own.
            mapping.close()
        done = time.perf_counter()
        log.info(
            "attached %s generation %d: %d tensors, %.2f GiB in %d segments (%s); "
            "build %.0f ms, map %.0f ms, bind %.0f ms",
            attachment.ready.cache, attachment.ready.generation, len(index.tensors), index.nbytes / 2**30,
            len(index.segments), self.options.mode, 1e3 * (built - began), 1e3 * (mapped - built),
            1e3 * (done - mapped),
        )  # fmt: skip
        return model, mapping, storages

    def _give_up(self, vllm_config: Any, model_config: Any, reason: WeightcachedError) -> int:
        """Count and log the reason, once: from here on the engine loads from disk. Returns the
        least device memory of that load, or 0 if unknown. Raises the reason, with fallback off, and
        OutOfDeviceMemoryError if a load from disk has no room.
        """
        fallback.counts[reason.code] += 1
        if not self.options.fallback:
            raise reason
        needed, no_room = self._room(vllm_config, model_config, reason)
        if not all_ranks(no_room is None, self.options.role):
            raise no_room or OutOfDeviceMemoryError(
                f"the cache cannot be used ({reason}), and another rank has no room for a load from disk beside it",
                code="no-room",
            )
        _forget_frames(reason)
        log.warning("loading from disk (%s): %s", self.options.fallback_load_format, reason)
        self._report(vllm_config, reason)
        return needed

    def _report(self, vllm_config: Any, reason: WeightcachedError) -> None:
        if reason.code == UnsupportedPlatformForIPCError.code:
            return
        try:
            fallback.report(self._socket_path(vllm_config), reason)
        except Exception as e:
            # Not worth an engine's start.
            log.debug("cannot tell the daemon: %s", e)

    def _room(
        self, vllm_config: Any, model_config: Any, reason: WeightcachedError
    ) -> tuple[int, OutOfDeviceMemoryError | None]:
        """Least device memory of a load from disk, and the error if it exceeds the free memory."""
        if reason.code == UnsupportedPlatformForIPCError.code:
            return 0, None
        needed = 0
        try:
            if caches := self._resident(vllm_config, [reason]):
                needed = self._least_bytes(vllm_config, model_config)
                device = build.device_of_worker(vllm_config.parallel_config)
                fallback.check_room(needed, device, caches, reason)
        except OutOfDeviceMemoryError as e:
            return needed, e
        except Exception as e:
            # Not worth an engine's start: the load itself reports an error.
            log.debug("cannot check whether a load from disk has room: %s", e)
        return needed, None

    def _least_bytes(self, vllm_config: Any, model_config: Any) -> int:
        with build.collection_paused(), build.isolated_build(vllm_config, keep=False):
            model = build.build_on_meta(vllm_config, model_config)
            return room.least_bytes(model, vllm_config)

    def _disk_loader(self) -> Any:
        disk = dataclasses.replace(
            self.load_config,
            load_format=self.options.fallback_load_format,
            model_loader_extra_config=self.options.fallback_extra_config,
        )
        return get_model_loader(disk)


def _generation_of(decision: AttachOutcome) -> tuple[str, int] | None:
    attachment = decision.attachment
    return (attachment.ready.cache, attachment.ready.generation) if attachment else None


def reason_of(e: Exception) -> WeightcachedError:
    """The error as a reason against mapping; an unexpected one is logged with its traceback."""
    if isinstance(e, WeightcachedError):
        return e
    if not isinstance(e, OSError):
        log.error("attaching failed", exc_info=e)
    return WeightCacheUnavailableError(
        f"attaching failed: {type(e).__name__}: {e}", code="attach-failed"
    )


def _forget_frames(e: BaseException | None) -> None:
    # Their locals hold a half-built model and its mapping, which would stay during the load from
    # disk.
    while e is not None:
        traceback.clear_frames(e.__traceback__)
        e = e.__cause__ or e.__context__


def _writes_weights(vllm_config: Any) -> str:
    """The option with which this engine would write into its weights while it runs; "" for none."""
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        return "weight_transfer_config"
    kept = getattr(vllm_config.model_config, "sleep_preserve_parameter_names", None)
    return "sleep_preserve_parameter_names" if kept else ""


def check_supported(vllm_config: Any, options: LoaderOptions) -> None:
    """Refuse options that a mapped cache cannot serve.

    Raises UnsupportedPlatformForIPCError, UnsupportedQuantForIPCError.
    """
    if not build.stage_of_platform():
        from vllm.platforms import current_platform

        raise UnsupportedPlatformForIPCError(
            f"platform {current_platform.device_name} has no segment backend"
        )
    parallel = vllm_config.parallel_config
    for name in ("enable_eplb", "enable_elastic_ep"):
        if getattr(parallel, name, False):
            raise UnsupportedQuantForIPCError(
                f"{name} moves experts while serving: leave it out to use the cache", code="eplb"
            )
    if options.mode == "zero_copy" and (writer := _writes_weights(vllm_config)):
        raise UnsupportedPlatformForIPCError(
            f"{writer} writes into weights that others map: use mode copy", code="weight-transfer"
        )
    for name, value in room.offloaded(vllm_config).items():
        if value:
            raise UnsupportedPlatformForIPCError(
                f"{name} {value} moves weights out of device memory: set it to 0 to use the cache",
                code="cpu-offload",
            )
