"""Block hashes from Python: the root hash of this process, and hashers for requests.

A block's hash is `F((parent hash, tokens, extra keys))`, so that it names the whole prefix. The
first block's parent is the root hash `NONE_HASH`, which `init_none_hash` makes. Processes that
compare hashes need the same function and the same PYTHONHASHSEED.

Names follow vLLM 0.25.1 (`vllm/v1/core/kv_cache_utils.py`, `vllm/utils/hashing.py`).
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from kvyard import _kvyard
from kvyard._kvyard import BlockHasher, HashFunction, Semantics
from kvyard.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "NONE_HASH",
    "get_hash_fn_by_name",
    "get_request_block_hasher",
    "hash_block_tokens",
    "init_none_hash",
]

logger = logging.getLogger(__name__)

NONE_HASH: bytes = b""
"""The root hash of this process; empty until `init_none_hash` has run."""

_RANDOM_ROOT_BYTES = 32


def get_hash_fn_by_name(name: str) -> HashFunction:
    """The hash function of that name.

    Args:
        name: "sha256" (vLLM's default), "sha256_cbor", "xxhash" or "xxhash_cbor".

    Returns:
        The function.

    Raises:
        ConfigError: The name is unknown.
    """
    return HashFunction(name)


def init_none_hash(hash_fn: HashFunction) -> None:
    """Make the root hash of this process; call once, before the first hasher is made.

    Where the environment has PYTHONHASHSEED, its text is hashed, whatever it says ("", "random" and
    "0" are texts like any other). Where it has not, the root is 32 random bytes, also for the
    16-byte functions, and no other process computes the same hashes; for the CBOR functions, which
    are chosen in order to share hashes, a warning says so.

    Args:
        hash_fn: The function that the hashers of this process will use.
    """
    global NONE_HASH
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        NONE_HASH = hash_fn(seed)
        return
    if hash_fn.name.endswith("_cbor"):
        logger.warning(
            "PYTHONHASHSEED is not set: block hashes made with %s will differ between processes",
            hash_fn.name,
        )
    NONE_HASH = os.urandom(_RANDOM_ROOT_BYTES)


def get_request_block_hasher(
    block_size: int, caching_hash_fn: HashFunction, semantics: Semantics | None = None
) -> BlockHasher:
    """A hasher that a `Request` can be built with.

    Args:
        block_size: Tokens per hashed block (vLLM's hash block size).
        caching_hash_fn: The hash function; `init_none_hash` must have seen the same.
        semantics: Whose rules for extra keys to follow; None means `Semantics.corrected()`. It must
            be that of the manager which the requests go to.

    Returns:
        The hasher. It keeps the root hash of this moment.

    Raises:
        ConfigError: `init_none_hash` has not run, or the block size is not positive.
    """
    if not NONE_HASH:
        raise ConfigError("NONE_HASH: not set yet; call init_none_hash first")
    return BlockHasher(caching_hash_fn, NONE_HASH, block_size, semantics or Semantics.corrected())


def hash_block_tokens(
    hash_function: HashFunction,
    parent_block_hash: bytes | None,
    curr_block_token_ids: Sequence[int],
    extra_keys: tuple[object, ...] | None = None,
    none_hash: bytes | None = None,
) -> bytes:
    """The hash of one block.

    Args:
        hash_function: The hash function.
        parent_block_hash: Hash of the block before; None or empty for a prompt's first block.
        curr_block_token_ids: The block's tokens.
        extra_keys: What besides the tokens decides, or None.
        none_hash: The root hash; None means `NONE_HASH`.

    Returns:
        The digest: 32 bytes for the SHA-256 functions, 16 for the xxHash ones.

    Raises:
        ConfigError: A first block is hashed before `init_none_hash` has run.
    """
    root = NONE_HASH if none_hash is None else none_hash
    if not parent_block_hash and not root:
        raise ConfigError("NONE_HASH: not set yet; call init_none_hash first")
    return _kvyard.hash_block_tokens(
        hash_function, parent_block_hash, curr_block_token_ids, extra_keys, root
    )
