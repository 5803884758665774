"""The audit, the report, and `kvyard explain`: the story is checked against what was done."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import kvyard
import pytest
from kvyard.cli.main import main

from tests.helpers import admit, make_manager, make_request

if TYPE_CHECKING:
    from pathlib import Path


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command prints."""
    assert main(["explain", *arguments]) == 0
    return capsys.readouterr().out


@pytest.fixture
def story(tmp_path: Path) -> tuple[str, kvyard.KVCacheManager]:
    """Block 1: a takes and caches it, b shares it, a is popped and its lease returned, b frees."""
    manager = make_manager(6)
    a, b = make_request("a", range(5)), make_request("b", range(6))
    admit(manager, a)
    hit, num_hit = manager.get_computed_blocks(b)
    manager.allocate_slots(b, 2, num_hit, hit)
    manager.free_popped(manager.pop_blocks_for_free(a))
    manager.free(b)
    manager.evict_blocks([1])
    path = tmp_path / "report.json"
    path.write_text(manager.report(), "utf-8")
    return str(path), manager


def test_story_of_a_block(
    story: tuple[str, kvyard.KVCacheManager], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = told(capsys, story[0], "--block", "1").splitlines()
    assert lines[0] == (
        "6 blocks, 5 free; groups: full_attention of 4 tokens; 0 requests hold blocks"
    )
    assert [line.strip() for line in lines[3:]] == [
        "#0 request 'a': allocate_slots(5 new tokens): "
        "taken from the free queue, cached under a key",
        "#1 request 'b': allocate_slots(2 new tokens, with a hit): one more reference",
        "#2 request 'a': pop_blocks_for_free(): its reference passed to a lease",
        "#3 request 'a': free_popped(): one reference given back",
        "#4 request 'b': free(): one reference given back",
        "#5 evict_blocks(): lost its keys",
        "now: 0 references of requests, 0 handed out (0 of them leased), in the free queue, no key",
    ]


def test_story_of_a_request(
    story: tuple[str, kvyard.KVCacheManager], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = told(capsys, story[0], "--request", "b").splitlines()
    assert [line.strip() for line in lines[2:]] == [
        "request 'b':",
        "#1 request 'b': allocate_slots(2 new tokens, with a hit): taken 3; referenced 1",
        "#4 request 'b': free(): released 3, 1",
    ]


def test_the_last_operations(
    story: tuple[str, kvyard.KVCacheManager], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = told(capsys, story[0], "--last", "2").splitlines()
    assert lines[-3:] == [
        "  (4 earlier ones; --last 6 tells all)",
        "  #4 request 'b': free(): released 3, 1",
        "  #5 evict_blocks(): unkeyed 1",
    ]


def test_a_violation_chooses_its_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report of an error says what is broken; the story is that of the block it names."""
    manager = make_manager(6)
    admit(manager, make_request("a", range(5)))
    report: dict[str, Any] = json.loads(manager.report())
    report["violation"] = "I2: block 2 in the free queue"
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report), "utf-8")
    output = told(capsys, str(path))
    assert "broken: I2: block 2 in the free queue" in output
    assert "block 2, as far as" in output
    assert "held by request 'a' at position 1 of group 0" in output


def test_names_of_any_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Quotes, control characters, other scripts, and names longer than what is kept."""
    for name in ['"quoted"\\', "tab\tand\x01", "数据-42", "é" * 60, "x" * 300]:
        manager = make_manager(6)
        admit(manager, make_request(name, range(5)))
        path = tmp_path / "report.json"
        path.write_text(manager.report(), "utf-8")
        assert json.loads(path.read_text("utf-8"))["requests"][0]["name"] == name
        assert "taken 1-2" in told(capsys, str(path), "--request", name)
        # Its row passes on: its operations are still its own.
        manager.free(make_request(name, range(5)))
        admit(manager, make_request("next", range(100, 108)))
        path.write_text(manager.report(), "utf-8")
        assert "taken 1-2" in told(capsys, str(path), "--request", name)
        assert "taken" in told(capsys, str(path), "--request", "next")


def test_256_operations_are_kept() -> None:
    """Older ones are gone; of a large one the first 1,024 effects are known."""
    manager = make_manager(2000)
    for at in range(300):
        request = make_request(f"r{at}", range(5))
        admit(manager, request)
        manager.free(request)
    blocks = manager.block_pool.get_new_blocks(1500)
    manager.block_pool.free_blocks(blocks)
    operations = json.loads(manager.report())["operations"]
    assert [operation["number"] for operation in operations] == list(range(603 - 256, 603))
    taken, _, freed = operations[-3:]  # between them: the lease becomes a plain list
    assert (taken["op"], len(taken["effects"])) == ("get_new_blocks(1500)", 1024)
    # One block of the 1,500 was cached: it lost its key, which is an effect besides.
    assert taken["num_forgotten"] in (1500 - 1024, 1501 - 1024)
    assert freed["num_forgotten"] == 1500 - 1024


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not JSON"),
        ("[1, 2]", "is not a report"),
        ('{"format": "kvyard-report-1"}', "is damaged"),
        ('{"format": "other"}', "is not a report"),
        ('{"format": "kvyard-report-1", "requests": 5}', "is damaged"),
        (
            '{"format": "kvyard-report-1", "requests": [{"name": "a", "blocks": [["x"]]}]}',
            "damaged",
        ),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_bad_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    path = tmp_path / "report.json"
    path.write_text(text, "utf-8")
    assert main(["explain", str(path)]) == 2
    assert says in capsys.readouterr().err


def test_bad_arguments(
    story: tuple[str, kvyard.KVCacheManager], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["explain", str(tmp_path / "none.json")]) == 2
    assert main(["explain", story[0], "--last", "0"]) == 2
    assert main(["explain", story[0], "--request", "nobody"]) == 2
    assert "no request 'nobody'" in capsys.readouterr().err


def test_the_audit_goes_round() -> None:
    """Slices of any size; a pass is counted when all was checked."""
    manager = make_manager(50)
    requests = [make_request(f"r{at}", range(at, at + 30)) for at in range(3)]
    for request in requests:
        admit(manager, request)
    assert manager.audit(0) == 0
    calls = 0
    while manager.audit(10) < 2:
        calls += 1
    assert calls > 10
    for request in requests:
        manager.free(request)
    assert manager.audit() >= 2
    with pytest.raises(kvyard.InvalidArgumentError, match="budget"):
        manager.audit(-1)
