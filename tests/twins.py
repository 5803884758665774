"""What the state machines share: requests in two worlds, strategies, comparisons."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import kvyard
from hypothesis import strategies as st

from tests import helpers
from tests.model import hashing as model_hashing
from tests.model import pool as model_pool

FIELDS = [f.name for f in dataclasses.fields(model_hashing.Semantics)]
ALGORITHMS = ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]


def named_semantics(name: str, flipped: str | None) -> kvyard.Semantics:
    """One of the two semantics, perhaps with one field as in the other."""
    names = ["corrected", "vllm_0_25_1"]
    chosen: kvyard.Semantics = getattr(kvyard.Semantics, name)()
    other = getattr(kvyard.Semantics, names[1 - names.index(name)])()
    return chosen.replace(**{flipped: getattr(other, flipped)}) if flipped else chosen


semantics_choices = st.builds(
    named_semantics,
    st.sampled_from(["corrected", "vllm_0_25_1"]),
    st.sampled_from([None, None, *FIELDS]),
)


def semantics_of_model(semantics: kvyard.Semantics) -> model_hashing.Semantics:
    """The same for the model."""
    return model_hashing.Semantics(**{name: getattr(semantics, name) for name in FIELDS})


def events_agree(ours: list[kvyard.KVCacheEvent], theirs: list[model_pool.Event]) -> None:
    """Compare events; the order of several alias removals of one block is free."""
    got = [helpers.event_as_dict(event) for event in ours]
    alias = [event.get("alias", False) for event in theirs]
    expected = [{k: v for k, v in event.items() if k != "alias"} for event in theirs]
    assert sort_alias_runs(got, alias) == sort_alias_runs(expected, alias)


def sort_alias_runs(events: list[dict[str, Any]], alias: list[bool]) -> list[dict[str, Any]]:
    """Sort each run of events whose order is free."""
    ordered: list[dict[str, Any]] = []
    run: list[dict[str, Any]] = []
    for event, is_alias in zip(events, alias, strict=True):
        if is_alias:
            run.append(event)
            continue
        ordered += [*sorted(run, key=repr), event]
        run = []
    return ordered + sorted(run, key=repr)


def pools_agree(ours: kvyard.BlockPool, theirs: model_pool.BlockPool) -> None:
    """Compare everything that a pool shows."""
    assert helpers.free_order(ours) == theirs.free
    assert ours.get_num_free_blocks() == ours.free_block_queue.num_free_blocks == len(theirs.free)
    blocks = list(ours.blocks)
    assert [b.ref_cnt for b in blocks] == [b.ref_cnt for b in theirs.blocks]
    assert [b.block_hash for b in blocks] == [b.key for b in theirs.blocks]
    assert [b.num_hash_tokens for b in blocks] == [b.key_tokens or None for b in theirs.blocks]
    cached = ours.cached_block_hash_to_block
    assert len(cached) == len(theirs.cached)
    for key, copies in theirs.cached.items():
        found = cached.get_one_block(key)
        assert found is not None
        assert found.block_id == copies[0]
        assert all(cached.contain(key, block_id) for block_id in copies)
    assert ours.get_usage() == theirs.usage()
    assert ours.num_blocks_stored == theirs.num_blocks_stored
    assert ours.num_blocks_removed == theirs.num_blocks_removed


@dataclass
class Twin:
    """One request in both worlds."""

    ours: kvyard.Request
    theirs: model_hashing.Request
    state: str = "waiting"  # waiting, loading, running
    foreign: bool = False
    """Whether the manager is shown a request of vLLM's kind."""

    @property
    def name(self) -> str:
        return self.theirs.id

    @property
    def remaining(self) -> int:
        return self.theirs.num_tokens - self.theirs.num_computed_tokens

    @property
    def shown(self) -> Any:
        return helpers.ForeignRequest(self.ours) if self.foreign else self.ours

    def set(self, **counters: Any) -> None:
        for name, value in counters.items():
            setattr(self.ours, name, value)
            setattr(self.theirs, name, value)

    def append(self, tokens: list[int]) -> None:
        self.ours.append_output_token_ids(tokens)
        self.theirs.append(tokens)
        assert self.ours.block_hashes == self.theirs.hashes


@dataclass
class Extras:
    """What besides its tokens decides about a request's blocks."""

    lora: str | None = None
    lora_path: str | None = None
    salt: str | None = None
    media: list[tuple[str, int, int]] = field(default_factory=list)


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Token lists that often share a prefix, up to 26 long."""
    base = draw(st.sampled_from([0, 100]))
    shared = draw(st.integers(0, 20))
    own = draw(st.lists(st.integers(70_000, 70_003), min_size=0 if shared else 1, max_size=6))
    return list(range(base, base + shared)) + own


@st.composite
def extras(draw: st.DrawFn) -> Extras:
    """Mostly none."""
    if draw(st.integers(0, 3)):
        return Extras()
    media, at = [], 0
    for _ in range(draw(st.integers(0, 3))):
        offset = at + draw(st.integers(0, 5))
        length = draw(st.integers(1, 5))
        media.append((draw(st.sampled_from(["image0", "image1"])), offset, length))
        at = offset + length
    lora = draw(st.sampled_from([None, "adapter", "tenant"]))
    path = draw(st.sampled_from([None, "/first", "/second"])) if lora else None
    return Extras(lora, path, draw(st.sampled_from([None, "", "tenant"])), media)


def own_text(text: str) -> str:
    """The text as an object of its own: pickle tells one object used twice from two equal ones."""
    return text.encode().decode()


def as_feature(identifier: str, offset: int, length: int) -> helpers.Media:
    """A media item as vLLM's requests carry it."""
    return helpers.Media(identifier, helpers.Placeholder(offset, length))


class Requests:
    """Makes requests in both worlds."""

    def __init__(self, algorithm: str, hash_block_size: int, semantics: kvyard.Semantics) -> None:
        self.size = hash_block_size
        self.ours = helpers.make_hasher(hash_block_size, semantics, algorithm)
        self.theirs = model_hashing.Hasher(algorithm, "0", semantics_of_model(semantics))
        self.count = 0

    def make(self, tokens: list[int], extra: Extras, skip_reading: bool = False) -> Twin:
        self.count += 1
        name = f"r{self.count}"
        # Both worlds get the very same text objects, each used once.
        lora = None if extra.lora is None else own_text(extra.lora)
        salt = None if extra.salt is None else own_text(extra.salt)
        # Media lie within the prompt: to drop tokens would drop those that lie behind.
        within = [item for item in extra.media if item[1] + item[2] <= len(tokens)]
        media = [(own_text(text), offset, length) for text, offset, length in within]
        path = extra.lora_path
        ours = kvyard.Request(
            name,
            tokens,
            mm_features=[as_feature(*item) for item in media] or None,
            lora_request=None if lora is None else helpers.Lora(lora, 7, path),
            cache_salt=salt,
            block_hasher=self.ours,
            skip_reading_prefix_cache=skip_reading,
        )
        theirs = model_hashing.Request(
            name,
            tokens,
            self.theirs,
            self.size,
            [model_hashing.MediaItem(*item) for item in media],
            None if lora is None else model_hashing.Lora(lora, 7, path),
            salt,
            skip_reading,
        )
        assert ours.block_hashes == theirs.hashes
        return Twin(ours, theirs)
