"""Real traces, replayed: the integers that vLLM 0.25.1's own manager gives."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from kvyard.cli.main import main

if TYPE_CHECKING:
    from pathlib import Path

FIRST = ("mooncake_conversation.first1000.jsonl.gz", 1_000, 13_732_944)
CONVERSATION = ("mooncake_conversation.full.jsonl.gz", 12_031, 144_793_823)
SYNTHETIC = ("mooncake_synthetic.full.jsonl.gz", 3_993, 61_194_628)

# Trace, blocks of the pool; then tokens hit, blocks stored, blocks removed.
ROWS = [
    (FIRST, 301, 511_488, 25_308, 25_009),
    (FIRST, 1_001, 537_088, 25_258, 24_259),
    (FIRST, 3_001, 841_216, 24_664, 21_665),
    (FIRST, 12_001, 2_662_912, 21_106, 9_107),
    (FIRST, 30_001, 2_959_360, 20_527, 0),
    (CONVERSATION, 1_410, 7_020_544, 262_779, 261_371),
    (CONVERSATION, 5_638, 20_252_672, 236_935, 231_299),
    (CONVERSATION, 22_551, 45_159_424, 188_289, 165_740),
    (CONVERSATION, 200_001, 54_063_104, 170_899, 0),
    (SYNTHETIC, 1_001, 5_307_392, 107_522, 106_523),
    (SYNTHETIC, 5_001, 17_714_176, 83_290, 78_291),
    (SYNTHETIC, 20_001, 36_274_176, 47_040, 27_041),
    (SYNTHETIC, 200_001, 39_802_880, 40_148, 0),
]


@pytest.mark.parametrize(
    ("trace", "num_blocks", "hit_tokens", "stored", "removed"),
    ROWS,
    ids=[f"{trace[0].split('.')[0]}-{num_blocks}" for trace, num_blocks, *_ in ROWS],
)
def test_trace(
    trace: tuple[str, int, int],
    num_blocks: int,
    hit_tokens: int,
    stored: int,
    removed: int,
    material: Path,
    tmp_path: Path,
) -> None:
    name, requests, input_tokens = trace
    file = material / "traces" / name
    if not file.exists():
        pytest.skip(f"{file} is absent")
    out = tmp_path / "report.json"
    sizes = ["--num-blocks", str(num_blocks), "--block-size", "512"]
    options = ["--sequential", "--no-store-outputs", "--json", str(out)]
    assert main(["replay", str(file), *sizes, *options]) == 0
    results = json.loads(out.read_text())["results"]
    assert (results["requests"], results["input_tokens"]) == (requests, input_tokens)
    assert results["hit_tokens"] == hit_tokens
    assert results["stored_blocks"] == stored
    assert results["removed_blocks"] == removed
