"""Loads models with vLLM's own loaders under weightcached.loader.watch, for test_watch.py.

Standard input has [{"engine": …, "role": …}, …]; the file named in argv[1] gets what the watch
recorded of each, as JSON. A vain open of /begin or /end stands before and after each load, where
strace sees it.
"""

from __future__ import annotations

import contextlib
import json
import sys

from weightcached.checkpoint.identity import record_checkpoint
from weightcached.config.drafts import checkpoint_arguments
from weightcached.loader.watch import Watch
from weightcached.vllm_compat import solo_rank
from weightcached.wire.loader_job import LoaderJob


def mark(name: str) -> None:
    with contextlib.suppress(FileNotFoundError), open(f"/{name}"):
        pass


def main() -> None:
    records = []
    for case in json.load(sys.stdin):
        job = LoaderJob(
            device="cpu0", cache="m/target", role=case["role"], generation=1, spec_digest="",
            engine=case["engine"], rank=0, boot_id="", socket_fd=0,
        )  # fmt: skip
        config, model_config = solo_rank.configs_of(solo_rank.create_vllm_config(job), case["role"])
        chosen = record_checkpoint(**checkpoint_arguments(case["engine"], case["role"]))
        watch = Watch(chosen)
        with solo_rank.solo_rank(config, 0):
            mark("begin")
            with watch.watching():
                solo_rank.load_for_stage(config, model_config, "loaded", lambda nbytes: None)
            mark("end")
        read = watch.read(str(config.load_config.load_format))
        records.append(
            {"root": read.root, "read": read.names, "absent": read.absent, "unread": read.unread}
        )
    with open(sys.argv[1], "w") as out:
        json.dump(records, out)


if __name__ == "__main__":
    main()
