"""Makes vLLM's Python importable where torchvision's compiled operators are missing.

Only when `benches/peers/vllm.sh` says so: with the operators present the declaration would clash.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

if os.environ.get("KVYARD_DECLARE_TORCHVISION"):
    torch: Any = importlib.import_module("torch")
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
