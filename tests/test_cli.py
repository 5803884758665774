"""The `kvyard` command."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvyard
import pytest
from kvyard.cli import progress
from kvyard.cli.generate import generate
from kvyard.cli.main import main
from kvyard.cli.mooncake import TokenMaker, TraceRequest
from kvyard.cli.report import chart, percentile

from tests.helpers import environment_without_colors

if TYPE_CHECKING:
    from collections.abc import Callable

Records = list[dict[str, Any]]


def write_trace(folder: Path, records: Records) -> Path:
    """A trace file."""
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def record(hash_ids: list[int], input_length: int, output_length: int = 1) -> dict[str, Any]:
    """One request of a trace."""
    return {
        "timestamp": 0,
        "input_length": input_length,
        "output_length": output_length,
        "hash_ids": hash_ids,
    }


def replay(trace: Path | str, *options: str, blocks: int = 100, block_size: int = 512) -> int:
    """The command with the options that nearly all tests need."""
    sizes = ["--num-blocks", str(blocks), "--block-size", str(block_size)]
    return main(["replay", str(trace), *sizes, "--sequential", *options])


def results_of(tmp_path: Path, trace: Path, *options: str, **sizes: int) -> dict[str, Any]:
    """The `results` of a replay's report."""
    out = tmp_path / "report.json"
    assert replay(trace, "--json", str(out), *options, **sizes) == 0
    results: dict[str, Any] = json.loads(out.read_text())["results"]
    return results


SHARED = [record([0, 1, 2], 1300), record([0, 1, 3], 1400), record([0, 1, 2], 1300)]


def test_replay_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path, SHARED)
    results = results_of(tmp_path, trace, "--no-store-outputs")
    assert results == {
        "requests": 3,
        "input_tokens": 4000,
        "output_tokens_stored": 0,
        "hit_tokens": 2048,
        "hit_ratio": 0.512,
        "stored_blocks": 2,
        "removed_blocks": 0,
        "occupancy_in_use": {"min": 3 / 99, "mean": 3 / 99, "max": 3 / 99},
        "occupancy_cached": {"min": 2 / 99, "mean": 2 / 99, "max": 2 / 99},
    }
    printed = capsys.readouterr().out
    assert "hit tokens                2,048   51.20%" in printed
    assert "not stored" in printed
    assert "get_computed_blocks" in printed


def test_replay_splits_ids_into_smaller_blocks(tmp_path: Path) -> None:
    trace = write_trace(tmp_path, SHARED)
    results = results_of(tmp_path, trace, "--no-store-outputs", blocks=1000, block_size=16)
    # The second request shares 1024 tokens, the third all 81 full blocks of the first.
    assert results["hit_tokens"] == 1024 + 81 * 16
    assert results["stored_blocks"] == 81 + (1400 // 16 - 64)


def test_a_partial_last_id_is_not_a_hit(tmp_path: Path) -> None:
    trace = write_trace(tmp_path, [record([0, 1], 1023), record([0, 1], 1024)])
    results = results_of(tmp_path, trace, "--no-store-outputs")
    assert results["hit_tokens"] == 512


def test_outputs_are_stored_unless_told_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [record([0], 500, 525), record([0], 500, 525)]
    results = results_of(tmp_path, write_trace(tmp_path, records))
    # 500 + 524 computed tokens fill two blocks each time; replies never repeat.
    assert results["output_tokens_stored"] == 2 * 524
    assert results["hit_tokens"] == 0
    assert results["stored_blocks"] == 4
    assert "stored, 1,048 tokens" in capsys.readouterr().out


def test_results_are_deterministic(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    assert main(["generate", "--requests", "200", "--out", str(trace)]) == 0
    first = results_of(tmp_path, trace, "--hash", "xxhash", blocks=150)
    assert first == results_of(tmp_path, trace, "--semantics", "vllm_0_25_1", blocks=150)
    assert first["removed_blocks"] > 0
    assert 0 < first["hit_ratio"] < 1


def test_replay_of_compressed_files_and_standard_input(tmp_path: Path) -> None:
    trace = write_trace(tmp_path, SHARED)
    compressed = tmp_path / "named_otherwise"
    compressed.write_bytes(gzip.compress(trace.read_bytes()))
    assert results_of(tmp_path, compressed) == results_of(tmp_path, trace)
    for data in (trace.read_bytes(), compressed.read_bytes()):
        done = kvyard_command("replay", "-", *REPLAY, data=data)
        assert done.returncode == 0, done.stderr
        assert "requests                      3" in done.stdout


REPLAY = ["--num-blocks", "100", "--block-size", "512", "--sequential"]


def kvyard_command(*arguments: str, data: bytes = b"") -> subprocess.CompletedProcess[str]:
    """The command as a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "kvyard", *arguments],
        input=data,
        capture_output=True,
        env=environment_without_colors(),
        check=False,
    )
    return subprocess.CompletedProcess(
        done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
    )


def broken(change: Callable[[dict[str, Any]], object]) -> str:
    """A good line and one that is not."""
    bad = record([3, 4], 600)
    change(bad)
    return json.dumps(record([0, 1, 2], 1300)) + "\n" + json.dumps(bad) + "\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: .*holds no request"),
        ("\n\n", "line 1: .*holds no request"),
        (broken(lambda r: r.pop("hash_ids")), "line 2: hash_ids: the field is missing"),
        (broken(lambda r: r.pop("timestamp")), "line 2: timestamp: the field is missing"),
        (broken(lambda r: r.update(hash_ids=[3])), "line 2: hash_ids: 1 ids.*make 2"),
        (broken(lambda r: r.update(hash_ids=[3, "x"])), "line 2: hash_ids: a list of whole"),
        (broken(lambda r: r.update(hash_ids=[3, -1])), "line 2: hash_ids: a list of whole"),
        (broken(lambda r: r.update(hash_ids=[3, 1 << 23])), "line 2: hash_ids: .*too large"),
        (broken(lambda r: r.update(input_length="600")), "line 2: input_length: '600'"),
        (broken(lambda r: r.update(input_length=0)), "line 2: input_length: 0"),
        (broken(lambda r: r.update(output_length=-1)), "line 2: output_length: -1"),
        (broken(lambda r: r.update(output_length=True)), "line 2: output_length: True"),
        (broken(lambda r: r.update(timestamp="now")), "line 2: timestamp: 'now'"),
        (broken(lambda r: None)[:-10], "line 2: not JSON"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "line 1: not JSON"),
        ("[1, 2]\n", "line 1: a JSON object is expected, not list"),
        (
            broken(lambda r: r.update(hash_ids=list(range(100)), input_length=51200)),
            "line 2: the prompt of 51,200 tokens take 100 blocks of 512, but the pool has 99",
        ),
        (
            broken(lambda r: r.update(output_length=51_000)),
            "line 2: the prompt and reply of 51,599 tokens take 101 blocks",
        ),
    ],
)
def test_bad_traces(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(text)
    out = tmp_path / "report.json"
    assert replay(trace, "--json", str(out)) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("kvyard: error: ")
    assert re.search(message, printed.err), printed.err
    report = json.loads(out.read_text())
    assert report["complete"] is False
    assert report["error"]["line"] == int(message.split(":")[0].removeprefix("line "))
    done = 1 if "line 2" in message else 0
    assert report["results"]["requests"] == done
    assert ("requests                      1" in printed.out) == bool(done)


def test_truncated_and_damaged_compression(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [record([i], 500) for i in range(20_000)]
    data = gzip.compress("".join(json.dumps(r) + "\n" for r in records).encode())
    trace = tmp_path / "trace.jsonl.gz"
    trace.write_bytes(data[: len(data) // 2])
    assert replay(trace) == 2
    printed = capsys.readouterr()
    assert "ends too early" in printed.err
    assert "line " in printed.err
    assert "stopped early" in printed.out
    trace.write_bytes(data[:2000] + bytes(2000) + data[4000:])
    assert replay(trace) == 2
    assert "line " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--block-size", "500"], "500 does not divide the 512"),
        (["--block-size", "1024"], "1024 does not divide the 512"),
        (["--block-size", "0"], "--block-size: 0 is not a positive number"),
        (["--num-blocks", "-3"], "--num-blocks: -3 is not a positive number"),
        (["--trace-block-size", "0"], "--trace-block-size: 0 is not"),
    ],
)
def test_bad_sizes(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay(write_trace(tmp_path, SHARED), *options) == 2
    assert message in capsys.readouterr().err


def test_no_such_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["replay", str(tmp_path / "absent"), *REPLAY], ["golden", str(tmp_path)]):
        assert main(command) == 2
        assert str(tmp_path) in capsys.readouterr().err


def test_the_model_must_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path, SHARED)
    assert main(["replay", str(trace), "--num-blocks", "9", "--block-size", "512"]) == 2
    assert "--sequential" in capsys.readouterr().err


def test_report_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(write_trace(tmp_path, SHARED), "--json", str(tmp_path)) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_trace_block_size(tmp_path: Path) -> None:
    trace = write_trace(tmp_path, [record([0, 1, 2], 40), record([0, 1, 3], 48)])
    options = ["--no-store-outputs", "--trace-block-size", "16"]
    results = results_of(tmp_path, trace, *options, block_size=8)
    assert results["hit_tokens"] == 32


# -- tokens


@pytest.mark.parametrize("size", [1, 16, 512])
def test_prompt_tokens(size: int) -> None:
    ids = [0, 7, 3, (1 << 31) // size - 1]
    length = 3 * size + 1
    tokens = TokenMaker(size).prompt(TraceRequest(1, 0, length, 0, ids))
    expected = [i * size + j for i in ids for j in range(size)][:length]
    assert list(tokens) == expected


def test_output_tokens_are_never_the_same() -> None:
    maker = TokenMaker(16)
    first, second = (maker.output(TraceRequest(line, 0, 1, 3, [0])) for line in (1, 2))
    assert not set(first) & set(second)
    assert min(*first, *second) >= 1 << 31


# -- generate


def test_generated_traces_are_sound() -> None:
    records: list[dict[str, Any]] = list(generate(500, 3, 512))
    assert records == list(generate(500, 3, 512))
    assert records != list(generate(500, 4, 512))
    times = [r["timestamp"] for r in records]
    assert times == sorted(times)
    prefix_of: dict[int, list[int]] = {}
    for r in records:
        ids = r["hash_ids"]
        assert len(ids) == -(-r["input_length"] // 512)
        for i, hash_id in enumerate(ids):  # an id names one prefix
            assert prefix_of.setdefault(hash_id, ids[:i]) == ids[:i]
    assert len(prefix_of) < sum(len(r["hash_ids"]) for r in records) / 2


def test_generate_writes_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, compressed = tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"
    for path in (plain, compressed):
        assert main(["generate", "--requests", "50", "--seed", "5", "--out", str(path)]) == 0
    assert gzip.decompress(compressed.read_bytes()) == plain.read_bytes()
    assert len(plain.read_text().splitlines()) == 50
    capsys.readouterr()
    assert main(["generate", "--requests", "50", "--seed", "5"]) == 0
    assert capsys.readouterr().out == plain.read_text()


def test_generate_refuses_nonsense(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--requests", "0"]) == 2
    assert "--requests" in capsys.readouterr().err


def test_first_steps_of_the_help_work(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    assert kvyard_command("generate", "--out", str(trace)).returncode == 0
    done = kvyard_command(
        "replay", str(trace), "--num-blocks", "2000", "--block-size", "16", "--sequential"
    )
    assert done.returncode == 0, done.stderr
    assert "hit tokens" in done.stdout


def test_a_reader_that_stops(tmp_path: Path) -> None:
    command = f"{sys.executable} -m kvyard generate --requests 5000 | head -n 1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, check=False)
    assert done.stderr == b""
    assert json.loads(done.stdout)["timestamp"] == 0


# -- golden


SUBSET = Path(__file__).parent / "golden" / "subset.jsonl.gz"


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_golden(jobs: str, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    options = ["--jobs", jobs, "--family", "full", "--family", "p?ol", "--json", str(out)]
    done = kvyard_command("golden", str(SUBSET), *options)
    assert done.returncode == 0, done.stderr
    closing = done.stdout.splitlines()[-1]
    results = json.loads(out.read_text())["results"]
    assert list(results["families"]) == ["full", "pool"]
    assert (
        closing == f"2 scenarios, {results['operations']} operations, 0 differences, 0 unsupported"
    )


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_golden_with_differences(jobs: str, tmp_path: Path) -> None:
    lines = gzip.decompress(SUBSET.read_bytes()).splitlines()
    scenario = json.loads(lines[0])
    scenario["ops"][0]["free"] += 1
    other = json.loads(lines[0])
    other["name"] = "other-000"
    other["config"]["groups"][0]["kind"] = "hyper_attention"
    path = tmp_path / "golden.jsonl"
    path.write_text(json.dumps(scenario) + "\n" + json.dumps(other) + "\n")
    done = kvyard_command("golden", str(path), "--jobs", jobs)
    assert done.returncode == 1
    *_, reason, closing = done.stdout.splitlines()
    assert "full-" in done.stdout
    assert "operation 0" in done.stdout
    assert reason == "unsupported, 1 scenarios: groups of kind 'hyper_attention' are not supported"
    count = len(scenario["ops"])
    assert closing == f"1 scenarios, {count} operations, 1 differences, 1 unsupported"


def test_golden_limit_and_unknown_family() -> None:
    done = kvyard_command("golden", str(SUBSET), "--limit", "1", "--jobs", "1")
    assert done.stdout.startswith("1 scenarios, ")
    done = kvyard_command("golden", str(SUBSET), "--family", "nonsense", "--jobs", "1")
    assert done.returncode == 2
    assert "no scenario of family nonsense; the files have: full, full-bs1" in done.stderr
    assert done.stdout == "0 scenarios, 0 operations, 0 differences, 0 unsupported\n"


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_golden_of_a_damaged_file(jobs: str, tmp_path: Path) -> None:
    path = tmp_path / "golden.jsonl"
    first = gzip.decompress(SUBSET.read_bytes()).splitlines()[0].decode()
    path.write_text(first + '\n{"name": "full-001", "config": {}}\n' + first * 2 + "\n")
    done = kvyard_command("golden", str(path), "--jobs", jobs)
    assert done.returncode == 2
    assert "line 2" in done.stderr
    assert done.stdout.startswith("1 scenarios, ")


# -- help, versions, progress


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ([], ["golden"], ["replay"], ["generate"]):
        with pytest.raises(SystemExit) as stopped:
            main([*command, "--help"])
        assert stopped.value.code == 0
        assert "kvyard generate" in capsys.readouterr().out or command == ["golden"]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"kvyard {kvyard.__version__}\n"


def test_progress_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    with progress.Progress("replaying", 200) as shown:
        shown.update(50, "7 requests")
    assert capsys.readouterr().err.startswith("replaying: 25 %, 7 requests, ")
    with progress.Progress("replaying", None) as shown:
        shown.update(50, "7 requests")
    assert capsys.readouterr().err.startswith("replaying: 7 requests, ")


def test_progress_without_rich(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with progress.Progress("replaying", 200):
        pass
    assert "kvyard[cli]" in capsys.readouterr().err


def test_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress.Progress("replaying", 200) as shown:
        shown.update(50, "7 requests")


def test_percentile() -> None:
    assert [percentile([1, 2, 3, 4], share) for share in (0.01, 0.5, 0.51, 0.99, 1)] == [
        1,
        2,
        3,
        4,
        4,
    ]
    assert percentile([7], 0.5) == 7


def test_chart() -> None:
    assert chart([], 1) == ""
    assert chart([0, 0], 0) == ""
    line = chart(list(range(1000)), 1000)
    assert len(line) == 60
    assert list(line) == sorted(line)
