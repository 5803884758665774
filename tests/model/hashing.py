"""Hash functions, extra keys and requests of the reference model."""

from __future__ import annotations

import hashlib
import pickle
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable

# Each tag text is one object wherever it occurs, so that pickle writes its second use as a
# reference; a literal in a function would be one as well, but only by the interpreter's grace.
LORA_TAG, MEDIA_TAG, SALT_TAG = "lora", "mm", "cache_salt"

_VLLM_0_25_1 = {
    "hash_domains": "bare",
    "media_cursor": "last_item",
    "eagle_credit": False,
    "eagle_retention": False,
    "common_prefix": "references",
    "removal_event": "every_copy",
    "sparse_store_event": "one_per_call",
    "deferred_free_order": "across_groups",
    "gate_counts_lookahead": False,
    "align_prediction": "estimate",
    "computed_ids_under_cp": False,
}


@dataclass(frozen=True)
class Semantics:
    """The fields of `kvyard.Semantics` that rows, hits and events show, by the same names."""

    hash_domains: str = "tagged"
    media_cursor: str = "first_overlap"
    eagle_credit: bool = True
    eagle_retention: bool = True
    common_prefix: str = "row_membership"
    removal_event: str = "last_copy"
    sparse_store_event: str = "one_per_run"
    deferred_free_order: str = "group_by_group"
    gate_counts_lookahead: bool = True
    align_prediction: str = "true_need"
    computed_ids_under_cp: bool = True


CORRECTED = Semantics()
VLLM_0_25_1 = replace(CORRECTED, **_VLLM_0_25_1)  # type: ignore[arg-type]


def require(condition: bool, message: str) -> None:
    """The model has no error classes: a schedule that trips this is wrong itself."""
    assert condition, message


def ceil_div(a: int, b: int) -> int:
    """Ceiling division."""
    return -(-a // b)


def floor_to(a: int, b: int) -> int:
    """The largest multiple of b that is at most a."""
    return a - a % b


def cbor(value: Any) -> bytes:
    """Canonical CBOR of the few types that occur in a hash input (manager 3.3)."""

    def head(major: int, n: int) -> bytes:  # the shortest form that holds n
        if n < 24:
            return bytes([major << 5 | n])
        forms = ((24, 1), (25, 2), (26, 4), (27, 8))
        code, size = next((code, size) for code, size in forms if n < 1 << (8 * size))
        return bytes([major << 5 | code]) + n.to_bytes(size, "big")

    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return head(0, value) if value >= 0 else head(1, -1 - value)
    if isinstance(value, bytes):
        return head(2, len(value)) + value
    if isinstance(value, str):
        return head(3, len(value.encode())) + value.encode()
    return head(4, len(value)) + b"".join(cbor(member) for member in value)


def pickled(value: Any) -> bytes:
    """A repeated *object* (not a repeated value) becomes a back reference (manager 3.3, W6)."""
    return pickle.dumps(value, protocol=5)


HASH_FUNCTIONS: dict[str, Callable[[Any], bytes]] = {  # manager 3.3
    "sha256": lambda value: hashlib.sha256(pickled(value)).digest(),
    "sha256_cbor": lambda value: hashlib.sha256(cbor(value)).digest(),
    "xxhash": lambda value: xxhash.xxh3_128_digest(pickled(value)),
    "xxhash_cbor": lambda value: xxhash.xxh3_128_digest(cbor(value)),
}


class Hasher:
    """A hash function, its root hash (manager 3.2: the seed is hashed as text) and the rules."""

    def __init__(self, algorithm: str, python_hash_seed: str, semantics: Semantics) -> None:
        self.function = HASH_FUNCTIONS[algorithm]
        self.none_hash = self.function(python_hash_seed)
        self.semantics = semantics


def make_key(block_hash: bytes, group_id: int) -> bytes:
    """manager 3.5."""
    return block_hash + group_id.to_bytes(4, "big")


def split_key(key: bytes) -> tuple[bytes, int]:
    """The inverse of `make_key`."""
    return key[:-4], int.from_bytes(key[-4:], "big")


def external_hash(block_hash: bytes) -> int:
    """manager 3.5: the low 64 bits."""
    return int.from_bytes(block_hash[-8:], "big")


@dataclass
class MediaItem:
    """A media item in the prompt."""

    identifier: str
    offset: int
    length: int


@dataclass
class Lora:
    """An adapter."""

    name: str
    id: int
    path: str | None = None


class Request:
    """Tokens, their hashes and the counters that the manager reads (manager 9.1)."""

    def __init__(
        self,
        request_id: str,
        prompt: list[int],
        hasher: Hasher,
        hash_block_size: int,
        media: list[MediaItem] | None = None,
        lora: Lora | None = None,
        cache_salt: str | None = None,
        skip_reading_prefix_cache: bool = False,
    ) -> None:
        self.id = request_id
        self.tokens = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.media = media or []
        self.lora = lora
        self.cache_salt = cache_salt
        self.skip_reading_prefix_cache = skip_reading_prefix_cache
        self.status = "WAITING"
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_preemptions = 0
        self.hasher = hasher
        self.hash_block_size = hash_block_size
        self.hashes: list[bytes] = []
        self._hash_completed_blocks()

    @property
    def num_tokens(self) -> int:
        """Prompt and outputs."""
        return len(self.tokens)

    def append(self, tokens: list[int]) -> list[bytes]:
        """Append output tokens, one after another; return the hashes that they completed."""
        before = len(self.hashes)
        for token in tokens:
            self.tokens.append(token)
            self._hash_completed_blocks()
        return self.hashes[before:]

    def truncate(self, num_tokens: int) -> None:
        """Drop tokens and the hashes of blocks that they filled (case W4: hashes go too)."""
        self.tokens = self.tokens[:num_tokens]
        self.hashes = self.hashes[: num_tokens // self.hash_block_size]

    def _hash_completed_blocks(self) -> None:
        # manager 3.1: a chain over complete blocks, resumed where the list ends.
        size = self.hash_block_size
        start = len(self.hashes) * size
        # manager 3.4: not at token 0, only the last media item is looked at.
        last_item_only = self.hasher.semantics.media_cursor == "last_item" and start > 0
        cursor = -1 if last_item_only else 0
        while start + size <= self.num_tokens:
            end = start + size
            members, cursor = self._extra_members(start, end, cursor)
            extras = tuple(self._in_domain(*member) for member in members) or None
            parent = self.hashes[-1] if self.hashes else self.hasher.none_hash
            tokens = tuple(self.tokens[start:end])
            self.hashes.append(self.hasher.function((parent, tokens, extras)))
            start += size

    def _in_domain(self, tag: str, member: Any) -> Any:
        """A member of the extra keys as the hash sees it (`hash_domains` of the semantics)."""
        if self.hasher.semantics.hash_domains == "bare":
            return member
        if tag == LORA_TAG:
            assert self.lora is not None
            return (tag, member, self.lora.path)
        return (tag, *member) if isinstance(member, tuple) else (tag, member)

    def _extra_members(self, start: int, end: int, cursor: int) -> tuple[list[Any], int]:
        members: list[Any] = []
        if self.lora is not None:
            members.append((LORA_TAG, self.lora.name))
        media_keys, cursor = self._media_keys(start, end, cursor)
        members += [(MEDIA_TAG, key) for key in media_keys]
        if start == 0 and self.cache_salt:
            members.append((SALT_TAG, self.cache_salt))
        return members, cursor

    def extra_keys(self, start: int, end: int, cursor: int = 0) -> tuple[Any, ...] | None:
        """What besides the tokens decides about [start, end), as events tell it (manager 3.4)."""
        members, _ = self._extra_members(start, end, cursor)
        return tuple(member for _, member in members) or None

    def _media_keys(self, start: int, end: int, cursor: int) -> tuple[list[tuple[str, int]], int]:
        keys: list[tuple[str, int]] = []
        if not self.media or self.media[-1].offset + self.media[-1].length <= start:
            return keys, cursor
        if cursor < 0:
            cursor += len(self.media)
        while cursor < len(self.media):
            item = self.media[cursor]
            item_end = item.offset + item.length
            if end <= item.offset:
                break
            if start < item_end:
                keys.append((item.identifier, item.offset - start))
            if end < item_end:
                break
            cursor += 1
        return keys, cursor

    def hashes_for(self, block_size: int) -> list[bytes]:
        """The hashes at a coarser block size: the last fine hash of each (manager 3.6)."""
        require(block_size % self.hash_block_size == 0, "a multiple of the hash block size")
        factor = block_size // self.hash_block_size
        return self.hashes[factor - 1 :: factor]
