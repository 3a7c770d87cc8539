"""Lets torchvision as PyPI has it be imported beside torch's CPU build.

Its library is linked against CUDA and does not load there, and two of the operators that it would
define are asked for at import. Images are resized by torch alone, without that library. `make
extras` puts this module into its environment, and imports it in each process (a .pth file).
"""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any

OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_defined: list[Any] = []


class Definer(importlib.abc.MetaPathFinder):
    """Defines the operators when torchvision is about to be imported, and finds nothing itself."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname != "torchvision" or _defined:
            return
        import torch

        library = torch.library.Library("torchvision", "DEF")
        for schema in OPERATORS:
            library.define(schema)
        _defined.append(library)


sys.meta_path.insert(0, Definer())
