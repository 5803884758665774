"""`docs/ownership.md` names, for each row of the table of edge cases, tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_misuse import MISUSES

ROOT = Path(__file__).parent.parent
ROWS = re.findall(
    r"^\| (\d+) \|[^|]*\|[^|]*\| ([^|]*) \| ([^|]*) \|$",
    (ROOT / "docs" / "ownership.md").read_text("utf-8"),
    re.MULTILINE,
)
PYTHON = "\n".join(path.read_text("utf-8") for path in (ROOT / "tests").glob("test_*.py"))
RUST = "\n".join(path.read_text("utf-8") for path in (ROOT / "crates").rglob("*.rs"))


def test_every_row_is_there() -> None:
    """Rows 47 to 50 are not the manager's."""
    assert [int(row) for row, _, _ in ROWS] == [*range(1, 47), *range(51, 56)]


@pytest.mark.parametrize(("row", "python", "rust"), ROWS, ids=[row for row, _, _ in ROWS])
def test_the_named_tests_exist(row: str, python: str, rust: str) -> None:
    assert row
    if python.startswith('"'):
        assert python.strip('"') in {misuse.name for misuse in MISUSES}
    elif not python.startswith("("):
        is_file = (ROOT / "tests" / f"{python}.py").is_file()
        assert is_file or f"def {python}(" in PYTHON
    if not rust.startswith("("):
        assert f"fn {rust}()" in RUST
