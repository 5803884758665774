"""`kvyard watch`: the state behind it, and the command against real publishers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from kvyard.cli.main import main
from kvyard.cli.report import check_writable
from kvyard.cli.stream_view import Rate, StreamView
from kvyard.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, ZmqPublisher

from tests.event_streams import CLEARED, Engine, endpoints, fresh_inproc, payload, removed, stored
from tests.helpers import environment_without_colors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(120)


def batch(*events: Any) -> KVEventBatch:
    """A batch of events."""
    return KVEventBatch(0.0, list(events), 0)


def store(
    hashes: list[Any], parent: Any = None, group: int | None = 0, first_token: int = 0
) -> BlockStored:
    """A store of blocks of 4 tokens."""
    tokens = list(range(first_token, first_token + 4 * len(hashes)))
    kind = "full_attention" if group == 0 else "sliding_window"
    return BlockStored(hashes, parent, tokens, 4, None, "GPU", None, None, group, kind)


def live(view: StreamView, group: int | None = 0) -> set[Any]:
    """Hashes of the live blocks."""
    return set(view.groups[group].live)


# -------------------------------------------------------------------------------------- the state


def test_groups_are_apart_and_blocks_are_sets() -> None:
    view = StreamView()
    view.apply(batch(store([1, 2]), store([2], group=1), store([2])), 0.0)
    assert (live(view), live(view, 1)) == ({1, 2}, {2})
    view.apply(batch(BlockRemoved([2], "GPU", 0), BlockRemoved([9], "GPU", 0)), 0.0)
    assert (live(view), live(view, 1)) == ({1}, {2})
    group = view.groups[0]
    assert (group.num_stored, group.num_removed, group.peak) == (3, 2, 2)
    assert (group.kind, view.groups[1].kind) == ("full_attention", "sliding_window")
    view.apply(batch(AllBlocksCleared()), 0.0)
    assert (live(view), live(view, 1)) == (set(), set())
    assert group.prefixes == {}


def test_streams_without_groups_and_with_bytes_for_hashes() -> None:
    view = StreamView()
    view.apply(batch(store([b"a", b"b"], group=None), BlockRemoved([b"a"], None)), 0.0)
    assert live(view, None) == {b"b"}
    assert [index for index, _ in view.sorted_groups()] == [None]


def test_a_boundary_inside_a_block_changes_no_block_size() -> None:
    """The event's `block_size` is what it covers (case C17), the group's is told beside it."""
    view = StreamView()

    def apply(block_size: int, group_block_size: int | None) -> int:
        tokens = list(range(block_size))
        event = BlockStored([block_size], None, tokens, block_size, None, "GPU", None, group_idx=0)
        view.apply(batch(replace(event, group_block_size=group_block_size)), 0.0)
        return view.groups[0].block_size

    assert apply(16, None) == 16
    assert apply(4, 16) == 16
    assert apply(12, 16) == 16
    assert apply(8, None) == 16
    # A new beginning may have another size.
    view.apply(batch(AllBlocksCleared()), 0.0)
    assert apply(32, None) == 32


def test_prefixes_are_told_by_their_first_block() -> None:
    view = StreamView()
    view.apply(batch(store([1, 2, 3], first_token=100), store([7], parent=99, first_token=50)), 0.0)
    view.apply(batch(store([4], parent=3), store([5], parent=2)), 1.0)
    [(_, first), (_, second)] = view.busiest(9, 1.0)
    assert (first.tokens, first.num_live, first.stores_lately(1.0)) == ([100, 101, 102, 103], 5, 5)
    assert (second.tokens, second.num_live) == ([50, 51, 52, 53], 1)
    # The first block goes, its descendants stay together.
    view.apply(batch(BlockRemoved([1], "GPU", 0)), 2.0)
    assert view.busiest(1, 2.0)[0][1].num_live == 4
    view.apply(batch(BlockRemoved([2, 3, 4, 5], "GPU", 0)), 2.0)
    assert [prefix.tokens for _, prefix in view.busiest(9, 2.0)] == [[50, 51, 52, 53]]


def test_a_dump_is_no_activity() -> None:
    view = StreamView()
    view.apply(batch(AllBlocksCleared(), store([1, 2, 3])), 0.0, is_dump=True)
    group = view.groups[0]
    assert (len(group.live), group.peak, group.num_stored) == (3, 3, 0)
    assert group.stores.per_second(1.0) == 0
    assert [(p.num_live, p.stores_lately(1.0)) for _, p in view.busiest(9, 1.0)] == [(3, 0)]


def test_busy_is_lately() -> None:
    view = StreamView()
    view.apply(batch(store([1, 2, 3])), 0.0)
    view.apply(batch(store([8], first_token=50)), 31.0)
    assert [prefix.num_live for _, prefix in view.busiest(9, 31.0)] == [1, 3]
    assert [prefix.num_live for _, prefix in view.busiest(1, 31.0)] == [1]


def test_rates_look_back_ten_seconds() -> None:
    rate = Rate()
    assert rate.per_second(0.0) == 0
    rate.add(30, 100.0)
    assert rate.per_second(100.5) == 30  # at least a second
    assert rate.per_second(103.0) == 10
    rate.add(20, 105.0)
    rate.add(10, 105.5)
    assert rate.per_second(109.9) == pytest.approx(60 / 9.9)
    assert rate.per_second(112.0) == 3  # the first are forgotten
    assert rate.per_second(116.0) == 0


# ------------------------------------------------------------------------------------ the command


@contextmanager
def busy(publisher: ZmqPublisher, seed: int = 1) -> Iterator[Engine]:
    """An engine that publishes until the block ends."""
    engine, stop = Engine(seed), threading.Event()

    def work() -> None:
        while not stop.wait(0.005):
            publisher.publish(engine.step())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield engine
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("scheme", ["tcp", "ipc", "inproc"])
def test_once_shows_what_the_engine_holds(
    scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint, replay = endpoints(scheme, tmp_path)
    out = tmp_path / "out.json"
    with ZmqPublisher(endpoint, replay, live_set=True, buffer_steps=1) as publisher:
        engine = Engine(3)
        for _ in range(50):
            publisher.publish(engine.step())
        assert publisher.replay_endpoint is not None
        options = ["--replay", publisher.replay_endpoint, "--once", "--num-blocks", "60"]
        assert main(["watch", publisher.endpoint, *options, "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    held = [sum(group == g for _, group in engine.content()) for g in (0, 1)]
    assert [group["live_blocks"] for group in report["groups"]] == held
    assert [group["kind"] for group in report["groups"]] == ["full_attention", "sliding_window"]
    assert (report["dumps"], report["lost"], report["gaps"]) == (1, 0, 0)
    text = capsys.readouterr().out
    assert f"{held[0]} ({100 * held[0] / 60:.0f} %)" in text
    assert "sliding_window" in text
    assert "prefix begins with tokens" in text


def test_seconds_and_gaps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    endpoint = fresh_inproc()
    with ZmqPublisher(endpoint, wire_format="vllm_0_25") as publisher, busy(publisher):
        assert main(["watch", endpoint, "--seconds", "1", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["received"] > 10
    assert report["groups"][0]["stored_per_second"] > 0
    assert report["groups"][0]["removed_blocks"] > 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{endpoint}: {report['received']:,} batches")


def test_a_reset_empties_the_view(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    endpoint, replay = fresh_inproc(), fresh_inproc()
    with ZmqPublisher(endpoint, replay, start_sequence=0) as publisher:
        publisher.publish(payload(stored([1, 2]), removed([2])))
        publisher.publish(payload(CLEARED, stored([3])))
        assert main(["watch", endpoint, "--replay", replay, "--once", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    [group] = report["groups"]
    assert (group["live_blocks"], group["stored_blocks"], group["removed_blocks"]) == (1, 3, 1)
    assert (report["received"], report["sequence"]) == (2, 1)


@pytest.mark.parametrize(
    "options", [["--seconds", "1"], ["--once", "--seconds", "1.5"], ["--once"]]
)
def test_a_replay_endpoint_that_is_dead_leaves_time_for_the_stream(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    endpoint, nobody = endpoints("ipc", tmp_path)
    with ZmqPublisher(endpoint) as publisher, busy(publisher):
        started = time.monotonic()
        command = ["watch", endpoint, "--replay", nobody, *options, "--json", str(out)]
        assert main(command) == 0
        took = time.monotonic() - started
    assert json.loads(out.read_text())["received"] > 10
    assert took < (8 if options == ["--once"] else 4)
    assert f"{nobody} did not answer 1 of our requests" in capsys.readouterr().err


def test_nothing_received_says_what_to_look_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", fresh_inproc(), "--seconds", "0.05"]) == 1
    captured = capsys.readouterr()
    assert "0 batches" in captured.out
    assert "topic" in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tcp://*:5557"], "tcp://127.0.0.1:5557"),
        (["tcp://h:1", "--replay", "tcp://*:5558"], "tcp://127.0.0.1:5558"),
        (["nowhere"], "nowhere"),
        (["tcp://h:1", "--seconds", "0"], "--seconds"),
        (["tcp://h:1", "--num-blocks", "0"], "--num-blocks"),
        (["tcp://h:1", "--prefixes", "-1"], "--prefixes"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["missing/out.json", "folder"])
def test_a_report_that_cannot_be_written_is_told_at_the_start(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    started = time.monotonic()
    arguments = ["watch", fresh_inproc(), "--seconds", "30", "--json", str(tmp_path / name)]
    assert main(arguments) == 2
    assert time.monotonic() - started < 15
    captured = capsys.readouterr()
    assert name in captured.err
    assert captured.out == ""


def test_looking_whether_a_report_can_be_written_changes_no_file(tmp_path: Path) -> None:
    check_writable(str(tmp_path / "new.json"))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old.json").write_text("kept")
    check_writable(str(tmp_path / "old.json"))
    assert (tmp_path / "old.json").read_text() == "kept"
    check_writable("/dev/null")


def test_without_pyzmq_the_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['zmq'] = None; from kvyard.cli.main import main;"
        "sys.exit(main(['watch', 'tcp://h:1']))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 2
    assert "kvyard[events]" in run.stderr


def test_help_teaches() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "kvyard", "watch", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=environment_without_colors(),
    )
    for word in ("tcp://engine:5557", "--kv-events-config", "--once", "kvyard[events,cli]"):
        assert word in run.stdout


def test_a_terminal_is_redrawn(tmp_path: Path) -> None:
    """Under a pseudo-terminal the view is drawn in place; it ends with the plain tables."""
    endpoint, replay = endpoints("ipc", tmp_path)
    code = (
        "import pty, sys; status = pty.spawn([sys.executable, '-m', 'kvyard', *sys.argv[1:]]);"
        "sys.exit(status >> 8)"
    )
    arguments = ["watch", endpoint, "--replay", replay, "--seconds", "1.5"]
    with ZmqPublisher(endpoint, replay) as publisher, busy(publisher):
        run = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=60,
            env={**environment_without_colors(), "TERM": "xterm"},
        )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("full_attention") > 2
    assert "\x1b[" in run.stdout


def test_an_interrupt_ends_it_with_the_tables(tmp_path: Path) -> None:
    import signal

    endpoint, replay = endpoints("ipc", tmp_path)
    # What runs in the background of a shell may ignore interrupts, and so would its children.
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from kvyard.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    with ZmqPublisher(endpoint, replay) as publisher, busy(publisher):
        watcher = subprocess.Popen(
            [sys.executable, "-c", program, "watch", endpoint, "--replay", replay],
            stdout=subprocess.PIPE,
            text=True,
        )
        server = publisher.replay_server
        assert server is not None
        while server.num_requests == 0:  # now it listens
            time.sleep(0.01)
        time.sleep(0.3)
        watcher.send_signal(signal.SIGINT)
        output, _ = watcher.communicate(timeout=60)
    assert watcher.returncode == 0
    assert "full_attention" in output
