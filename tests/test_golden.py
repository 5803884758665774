"""Recorded answers of vLLM 0.25.1: a subset that is always there, and all of them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from kvyard.cli.golden import family_of, matches
from kvyard.cli.main import main
from kvyard.cli.scenario import differing_values, replay_scenario

SUBSET = Path(__file__).parent / "golden" / "subset.jsonl.gz"

SCENARIOS = {
    family_of(scenario["name"]): scenario
    for scenario in map(json.loads, gzip.decompress(SUBSET.read_bytes()).splitlines())
}


# One scenario, the shortest, of each recorded family.
NUM_FAMILIES = 74


def test_subset_has_each_family() -> None:
    assert len(SCENARIOS) == NUM_FAMILIES


def test_subset_is_of_the_recording(material: Path) -> None:
    golden = material / "golden" / "vllm-0.25.1.jsonl.gz"
    if not golden.exists():
        pytest.skip(f"{golden} is absent")
    shortest: dict[str, bytes] = {}
    for line in gzip.decompress(golden.read_bytes()).splitlines(keepends=True):
        family = family_of(json.loads(line)["name"])
        shortest[family] = min(shortest.get(family, line), line, key=len)
    assert gzip.decompress(SUBSET.read_bytes()) == b"".join(shortest.values())


@pytest.mark.parametrize("family", SCENARIOS)
def test_subset(family: str) -> None:
    outcome = replay_scenario(SCENARIOS[family], most_shown=3)
    assert outcome.shown == []
    assert outcome.unsupported is None
    assert outcome.differences == 0
    assert outcome.operations == len(SCENARIOS[family]["ops"])


def test_all(material: Path, capsys: pytest.CaptureFixture[str]) -> None:
    golden = material / "golden" / "vllm-0.25.1.jsonl.gz"
    if not golden.exists():
        pytest.skip(f"{golden} is absent")
    status = main(["golden", str(golden)])
    closing = capsys.readouterr().out.splitlines()[-1]
    assert closing == "733 scenarios, 657515 operations, 0 differences, 0 unsupported"
    assert status == 0


# -- the comparison itself


def altered(family: str, operation: str, **changes: Any) -> dict[str, Any]:
    """A scenario in which one answer, the first of an operation, is wrong."""
    scenario: dict[str, Any] = json.loads(json.dumps(SCENARIOS[family]))
    recorded = next(op for op in scenario["ops"] if op["op"] == operation)
    recorded.update(changes)
    return scenario


def test_a_wrong_value_is_found() -> None:
    outcome = replay_scenario(altered("full", "allocate_slots", free=999), most_shown=3)
    assert outcome.differences == 1
    assert "free: kvyard" in outcome.shown[0]
    assert "recorded 999" in outcome.shown[0]
    assert outcome.operations == len(SCENARIOS["full"]["ops"])


def test_each_wrong_value_counts() -> None:
    usage = {"free_order": [99, 98], "usage": 2}
    first = altered("full", "state")
    recorded = next(op["ret"] for op in first["ops"] if op["op"] == "state")
    outcome = replay_scenario(altered("full", "state", ret={**recorded, **usage}), most_shown=1)
    assert outcome.differences == 4  # two ids, the length, the usage
    assert len(outcome.shown) == 1


def test_a_missing_answer_is_found() -> None:
    outcome = replay_scenario(altered("full", "take_new_block_ids", ret=None), most_shown=1)
    assert outcome.differences == 1


def test_a_wrong_root_is_found() -> None:
    scenario = json.loads(json.dumps(SCENARIOS["full"]))
    scenario["config"]["hash"]["none_hash"] = "00" * 32
    assert replay_scenario(scenario, most_shown=1).differences == 1


def test_an_exception_is_a_difference() -> None:
    outcome = replay_scenario(altered("full", "allocate_slots", num_new_tokens=-1), 1)
    assert outcome.differences == 1
    assert "raised InvalidArgumentError" in outcome.shown[0]


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("config", "groups"), [{"kind": "hyper_attention", "block_size": 4}]),
        (("ops", 0, "op"), "swap_out"),
    ],
)
def test_unsupported(where: tuple[Any, ...], value: object) -> None:
    scenario = json.loads(json.dumps(SCENARIOS["full"]))
    place = scenario
    for step in where[:-1]:
        place = place[step]
    place[where[-1]] = value
    outcome = replay_scenario(scenario, most_shown=1)
    assert outcome.unsupported is not None
    assert outcome.differences == 0


@pytest.mark.parametrize(
    ("got", "expected", "paths"),
    [
        ({"a": [1, 2]}, {"a": [1, 2]}, []),
        ({"a": [1, 2]}, {"a": [1, 3]}, ["a[1]"]),
        ({"a": [1, 2]}, {"a": [1]}, ["length of a"]),
        ({"a": None}, {"a": []}, ["a"]),
        ({"a": 1}, {"b": 1}, ["b", "a"]),
        ({"a": True}, {"a": 1}, ["a"]),
    ],
)
def test_differing_values(got: object, expected: object, paths: list[str]) -> None:
    assert [path for path, _, _ in differing_values(got, expected)] == paths


@pytest.mark.parametrize(
    ("family", "pattern", "expected"),
    [
        ("full", "full", True),
        ("full-bs1", "full", False),
        ("full-bs1", "full-*", True),
        ("full+swa", "full+swa", True),
        ("full8+swa4", "full[48]+swa4", True),
        ("odd[1]", "odd[1]", True),
    ],
)
def test_family_patterns(family: str, pattern: str, expected: bool) -> None:
    assert matches(family, [pattern]) == expected
    assert matches(family, [])


def test_family_of() -> None:
    assert family_of("full-dcp2-pcp2-007") == "full-dcp2-pcp2"
    assert family_of("full16+swa4-hash4-000") == "full16+swa4-hash4"
