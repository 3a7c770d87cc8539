"""The sleep back end `weightcached` (--sleep-mode-backend).

vLLM's own back end keeps everything but weights and KV cache. Mapped weights stay mapped, and our
KV cache lies over scratch memory while the engine sleeps.
"""

from __future__ import annotations

from vllm.device_allocator.sleep_mode_backend import CuMemBackend

from weightcache_loader.swap import mixed_checkpoints, ranks_agree
from weightcached.errors import WeightCacheUnavailableError
from weightcached.model import mapped
from weightcached.vllm_compat import worker as vllm_worker
from weightcached.vllm_compat.build import all_ranks


class WeightcachedBackend(CuMemBackend):  # type: ignore[misc]
    """All ranks sleep and wake, or none does."""

    @classmethod
    def is_supported(cls) -> bool:
        from vllm.platforms import current_platform

        return bool(current_platform.is_cuda())

    def suspend(self, level: int = 1) -> None:
        """Free the KV cache's memory, and the rest as vLLM does. Mapped weights stay, as parked."""
        self._park_kv_cache()
        super().suspend(level)
        for model in mapped.of_process():
            model.park()

    def resume(self, tags: list[str] | None = None) -> None:
        """Bring the memory back. Raises the reason of any rank that cannot wake.

        Then all ranks stay asleep, and the caller can try again.
        """
        weights, kv_cache = (tags is None or name in tags for name in ("weights", "kv_cache"))
        models = list(mapped.of_process()) if weights else []
        error: Exception | None = None
        try:
            for model in models:
                model.prepare_wake()
            if kv_cache and (pool := vllm_worker.kv_pool()) is not None:
                pool.scratch.wake()
        except Exception as e:
            error = e
        try:
            if not all_ranks(error is None, "target"):
                raise error or WeightCacheUnavailableError(
                    "another rank of this engine cannot wake", code="another-rank"
                )
            # One whose daemon served others by then may have had to take these.
            if weights and not ranks_agree(model.index for model in models):
                raise mixed_checkpoints("have")
            super().resume(tags)
        except BaseException:
            if kv_cache:
                self._park_kv_cache()
            for model in models:
                model.give_up_wake()
            self._state = "SUSPENDED"
            raise
        for model in models:
            model.wake()

    def discard(self, tags: tuple[str, ...]) -> None:
        """Free memory without keeping its content. Raises RuntimeError for mapped weights."""
        if "weights" in tags and any(mapped.of_process()):
            raise RuntimeError("mapped weights cannot be discarded: sleep instead")
        if "kv_cache" in tags:
            self._park_kv_cache()
        super().discard(tags)

    def _park_kv_cache(self) -> None:
        if (pool := vllm_worker.kv_pool()) is not None:
            pool.scratch.park()
