"""What all tests share: material from outside the repository, and Hypothesis profiles."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

REPOSITORY = Path(__file__).parent.parent

# The golden data and the traces are large and not ours to ship: a developer has them beside the
# repository, and tests that need them skip where they are absent.
MATERIAL = Path(os.environ.get("KVYARD_MATERIAL", REPOSITORY.parent / "shared"))

_COMMON: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("dev", max_examples=30, stateful_step_count=40, **_COMMON)
settings.register_profile(
    "ci", max_examples=100, stateful_step_count=60, derandomize=True, **_COMMON
)
settings.register_profile("deep", max_examples=2000, stateful_step_count=100, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if "CI" in os.environ else "dev"))


@pytest.fixture(scope="session")
def material() -> Path:
    """The folder of golden data and traces; the test is skipped where there is none."""
    if not MATERIAL.is_dir():
        pytest.skip(f"no material at {MATERIAL}; set KVYARD_MATERIAL to its folder")
    return MATERIAL
