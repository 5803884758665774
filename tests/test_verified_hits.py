"""`verify_tokens`: a hit serves no other prefix, whatever the block hashes say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import kvyard
import pytest

from tests.helpers import Lora, admit, cache_config, full, ids_of, make_manager, make_request

if TYPE_CHECKING:
    from collections.abc import Iterable


def forged(name: str, tokens: Iterable[int], hashes: list[bytes], **more: Any) -> SimpleNamespace:
    """A request of another engine that says what it likes about its hashes."""
    token_ids = list(tokens)
    fields: dict[str, Any] = {
        "request_id": name,
        "num_tokens": len(token_ids),
        "num_prompt_tokens": len(token_ids),
        "num_computed_tokens": 0,
        "num_preemptions": 0,
        "status": "WAITING",
        "skip_reading_prefix_cache": False,
        "block_hashes": hashes,
        "all_token_ids": token_ids,
        **more,
    }
    return SimpleNamespace(**fields)


@pytest.mark.parametrize("verify", [False, True])
def test_forged_hashes(verify: bool) -> None:
    """The thief names the victim's hashes; without verification it gets the victim's blocks."""
    manager = make_manager(12, verify_tokens=verify)
    victim = make_request("victim", range(9))
    admit(manager, victim)
    thief: Any = forged("thief", range(100, 109), list(victim.block_hashes))
    _, num_hit = manager.get_computed_blocks(thief)
    assert num_hit == (0 if verify else 8)
    # The victim's own prefix is found as ever, also by an engine of that kind.
    again: Any = forged("again", range(9), list(victim.block_hashes))
    for request in (make_request("same", range(9)), again):
        blocks, num_hit = manager.get_computed_blocks(request)
        assert (num_hit, ids_of(blocks.blocks[0])) == (8, [1, 2])


def test_a_forged_block_hides_nothing() -> None:
    """The forger came first: its block stands before the honest one under the same hash."""
    manager = make_manager(12, verify_tokens=True)
    honest = make_request("honest", range(9))
    forger: Any = forged("forger", range(100, 109), list(honest.block_hashes))
    manager.allocate_slots(forger, 9)
    assert manager.get_computed_blocks(honest)[1] == 0
    manager.allocate_slots(honest, 9)
    blocks, num_hit = manager.get_computed_blocks(make_request("later", range(9)))
    assert num_hit == 8
    assert ids_of(blocks.blocks[0]) == ids_of(manager.get_blocks("honest").blocks[0])[:2]
    manager.validate()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {"cache_salt": "s"}),
        ({"cache_salt": "s"}, {"cache_salt": "t"}),
        ({}, {"lora_request": Lora("a", 1)}),
        ({"lora_request": Lora("a", 1)}, {"lora_request": Lora("b", 2)}),
    ],
)
def test_extra_keys_are_part_of_it(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Equal tokens under another salt or adapter are another prefix."""
    manager = make_manager(12, verify_tokens=True)
    mine = make_request("mine", range(9), **ours)
    admit(manager, mine)
    other: Any = forged("other", range(9), list(mine.block_hashes), **theirs)
    same: Any = forged("same", range(9), list(mine.block_hashes), **ours)
    assert manager.get_computed_blocks(other)[1] == 0
    assert manager.get_computed_blocks(same)[1] == 8


def test_blocks_filled_while_decoding() -> None:
    """Fingerprints grow with the request, and shrink with it."""
    manager = make_manager(12, verify_tokens=True)
    request = make_request("r", range(6))
    admit(manager, request)
    request.num_computed_tokens = 6
    for token in range(50, 56):
        request.append_output_token_ids(token)
        manager.allocate_slots(request, 1)
        request.num_computed_tokens += 1
    twin = make_request("twin", [*range(6), *range(50, 56), 1])
    assert manager.get_computed_blocks(twin)[1] == 12
    request.truncate(6)
    request.append_output_token_ids([7, 7])
    manager.free(request)
    request.num_computed_tokens = 0
    manager.allocate_slots(request, 8)
    assert manager.get_computed_blocks(make_request("other", [*range(6), 7, 7, 9]))[1] == 8


def test_groups_of_different_block_sizes() -> None:
    """A block's fingerprint is the one of its last hash block; two managers share a request."""
    config = cache_config(24, full(8), full(4))
    managers = [kvyard.KVCacheManager(config, max_model_len=64, verify_tokens=True) for _ in "ab"]
    request = make_request("r", range(17))
    forger: Any = forged("forger", range(100, 117), list(request.block_hashes))
    for manager in managers:
        manager.allocate_slots(request, 17)
        assert manager.get_computed_blocks(make_request("twin", range(17)))[1] == 16
        assert manager.get_computed_blocks(make_request("fork", [*range(12), 7, 8, 9]))[1] == 8
        assert manager.get_computed_blocks(forger)[1] == 0
        manager.validate()
