"""The compiled core. Import its classes from `kvyard`; counts are in tokens or blocks as named."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, Self, final, overload

from kvyard.events import KVCacheEvent, KVEventBatch

__all__ = [
    "BlockHasher",
    "BlockLease",
    "BlockLeaseIterator",
    "BlockPool",
    "CacheHit",
    "CachedBlocks",
    "FreeBlockQueue",
    "HashFunction",
    "KVCacheBlock",
    "KVCacheBlocks",
    "KVCacheEvictionEvent",
    "KVCacheManager",
    "KVCacheMetricsCollector",
    "LiveSet",
    "LostLease",
    "PoolBlocks",
    "PrefixCacheStats",
    "PrefixIndex",
    "Request",
    "Semantics",
    "decode_batch",
    "encode_batch",
    "hash_block_tokens",
    "inspect_batch",
]

class _Request(Protocol):
    """What a manager reads of a request: kvyard's `Request`, vLLM's, or anything alike."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def status(self) -> Any: ...
    @property
    def block_hashes(self) -> Sequence[bytes]: ...
    @property
    def all_token_ids(self) -> Sequence[int]: ...
    @property
    def skip_reading_prefix_cache(self) -> bool: ...

class _KVCacheGroupSpec(Protocol):
    @property
    def kv_cache_spec(self) -> Any: ...
    @property
    def is_eagle_group(self) -> bool: ...

class _KVCacheConfig(Protocol):
    @property
    def num_blocks(self) -> int: ...
    @property
    def kv_cache_groups(self) -> Sequence[_KVCacheGroupSpec]: ...

@final
class Semantics:
    """Whose decisions: vLLM 0.25.1's, fault for fault, or the mended ones. A value: ==, hash."""

    @staticmethod
    def vllm_0_25_1() -> Semantics:
        """Decision for decision what vLLM 0.25.1 does."""
    @staticmethod
    def corrected() -> Semantics:
        """The same with its faults mended; the default everywhere."""
    def replace(self, **fields: str | bool) -> Semantics:
        """A copy with some fields changed, to take up single mends.

        Args:
            **fields: New values by the attribute names of this class.

        Raises:
            InvalidArgumentError: A field or its value is unknown.
        """
    @property
    def hash_domains(self) -> Literal["bare", "tagged"]:
        """How extra keys enter a hash: bare, so that an adapter and a salt of one name collide."""
    @property
    def media_cursor(self) -> Literal["last_item", "first_overlap"]:
        """Which media item incremental hashing starts from."""
    @property
    def eagle_credit(self) -> bool:
        """Whether an EAGLE group keeps its last block where a cached one past the cap proves it."""
    @property
    def eagle_retention(self) -> bool:
        """Whether sparse retention keeps the block that the EAGLE drop consumes."""
    @property
    def common_prefix(self) -> Literal["references", "row_membership"]:
        """What makes a block common: its reference count, or standing in every request's row."""
    @property
    def removal_event(self) -> Literal["every_copy", "last_copy"]:
        """When `BlockRemoved` is due: for each copy of a hash that goes, or for the last."""
    @property
    def sparse_store_event(self) -> Literal["one_per_call", "one_per_run"]:
        """How a stored span with gaps is announced: as one event, or one per contiguous run."""
    @property
    def deferred_free_order(self) -> Literal["across_groups", "group_by_group"]:
        """In which order a lease's blocks go back."""
    @property
    def stats_on(self) -> Literal["lookup", "admission"]:
        """When a lookup is counted: always, or once when the request is admitted."""
    @property
    def gate_counts_lookahead(self) -> bool:
        """Whether `full_sequence_must_fit` counts look-ahead slots."""
    @property
    def planner_reserves_null(self) -> bool:
        """Whether the memory check of a plan leaves room for the null block."""
    @property
    def group_merge(self) -> Literal["layer_order", "order_independent"]:
        """Whether the order of layers decides how their specs merge into groups."""
    @property
    def align_prediction(self) -> Literal["estimate", "true_need"]:
        """What admission of Mamba "align" groups rests on."""
    @property
    def computed_ids_under_cp(self) -> bool:
        """Whether `get_block_ids_for_computed_tokens` counts tokens over all ranks."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class HashFunction:
    """One of vLLM's four block-hash functions; compares equal by name."""

    def __new__(cls, name: str) -> Self:
        """Choose a function.

        Args:
            name: "sha256", "sha256_cbor", "xxhash" or "xxhash_cbor".

        Raises:
            ConfigError: The name is unknown.
        """
    @property
    def name(self) -> str:
        """The function's name."""
    @property
    def width(self) -> int:
        """Bytes per digest: 32 for SHA-256, 16 for XXH3-128."""
    def __call__(self, value: object) -> bytes:
        """Hash a text, or a triple (parent hash, token ids, extra keys or None).

        The functions without "cbor" hash the pickled value, in which a repeated object (not a
        repeated value) is written as a reference: the same text object twice hashes otherwise than
        two equal texts (vLLM `vllm/utils/hashing.py`).

        Args:
            value: A str, or the triple; extra keys may nest str, bytes, int, None and tuples.

        Raises:
            InvalidArgumentError: The value is of another shape.
        """
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

def decode_batch(payload: bytes | bytearray | memoryview) -> KVEventBatch:
    """The events in a payload of vLLM 0.25 or 0.33, SGLang or kvyard.

    Events may be maps or arrays, hashes ints of either sign (answered as the unsigned int of the
    same bits) or bytes. Unknown fields are left out, and so are events of unknown types and of
    blocks on another machine (vLLM 0.33's `locality`).

    Raises:
        EventDecodeError: It is no batch of events.
    """

def inspect_batch(payload: bytes | bytearray | memoryview) -> tuple[float, bool]:
    """What following a stream takes, without making objects.

    Returns:
        The batch's time in seconds since the epoch, and whether its first event, of those that
        `decode_batch` would answer or leave out, is an `AllBlocksCleared`.

    Raises:
        EventDecodeError: It is no batch of events.
    """

def encode_batch(
    events: Iterable[object],
    ts: float,
    data_parallel_rank: int | None = 0,
    wire_format: str = "router",
) -> bytes:
    """Event objects, a connector's own say, as one msgpack payload.

    Args:
        events: Events of kvyard, or of vLLM: classes of the same names and fields.
        ts: Seconds since the epoch.
        data_parallel_rank: The engine's rank; None only in vLLM's formats, which say nil then.
        wire_format: A `kvyard.events.WireFormat`. Only `router` writes a `cache_salt`.

    Raises:
        InvalidArgumentError: No such format, a missing rank, or a field of a wrong type.
    """

def hash_block_tokens(
    hash_function: HashFunction,
    parent_block_hash: bytes | None,
    curr_block_token_ids: Sequence[int],
    extra_keys: tuple[object, ...] | None = None,
    none_hash: bytes | None = None,
) -> bytes:
    """The hash of one block; `kvyard.hash_block_tokens` fills in the root hash.

    Args:
        hash_function: The hash function.
        parent_block_hash: Hash of the block before; None or empty for a first block.
        curr_block_token_ids: The block's tokens.
        extra_keys: What besides the tokens decides, or None.
        none_hash: The root hash; needed where there is no parent.

    Raises:
        InvalidArgumentError: There is neither parent nor root, or a value cannot be hashed.
    """

@final
class BlockHasher:
    """One way of hashing requests: function, root hash, block size and rules for extra keys."""

    def __new__(
        cls,
        hash_function: HashFunction | str,
        none_hash: bytes,
        hash_block_size: int,
        semantics: Semantics = ...,
    ) -> Self:
        """Make a hasher; `kvyard.get_request_block_hasher` takes the root hash of the process.

        Args:
            hash_function: The function, or its name.
            none_hash: The root hash.
            hash_block_size: Tokens per hashed block.
            semantics: Default `Semantics.corrected()`; must be the manager's.

        Raises:
            ConfigError: The name is unknown or the block size is not positive.
        """
    @property
    def hash_function(self) -> HashFunction:
        """The function."""
    @property
    def none_hash(self) -> bytes:
        """The root hash."""
    @property
    def hash_block_size(self) -> int:
        """Tokens per hashed block."""
    @property
    def semantics(self) -> Semantics:
        """The rules for extra keys."""
    def __call__(self, request: _Request) -> list[bytes]:
        """Hashes of the blocks that filled up since the last one in `request.block_hashes`.

        Nothing is appended to the request (vLLM `get_request_block_hasher`).
        """

@final
class Request:
    """A request: its tokens, their block hashes, and the counters that a scheduler keeps."""

    def __new__(
        cls,
        request_id: str,
        prompt_token_ids: Sequence[int] | None,
        sampling_params: Any = None,
        pooling_params: Any = None,
        client_index: int = 0,
        arrival_time: float | None = None,
        prompt_embeds: Any = None,
        prompt_embeds_mask: Any = None,
        mm_features: Sequence[Any] | None = None,
        lora_request: Any = None,
        cache_salt: str | None = None,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
        block_hasher: BlockHasher | None = None,
        resumable: bool = False,
        lora_path: str | None = None,
        skip_reading_prefix_cache: bool | None = None,
    ) -> Self:
        """Make a request in state WAITING and hash its full blocks.

        Args:
            request_id: Its name, unique among the requests that hold blocks.
            prompt_token_ids: The prompt; a buffer of uint32 (`array.array("I")`) is fastest. None
                where `prompt_embeds` is all there is: each position then counts as token 0.
            sampling_params: Kept; asked for `skip_reading_prefix_cache`.
            pooling_params: Kept; asked where there are no sampling parameters.
            client_index: Kept.
            arrival_time: Seconds since the epoch; None means now.
            prompt_embeds: Embeddings, one row per position, as float32 rows of a buffer.
            prompt_embeds_mask: Which positions are embedded; enters hashes under "tagged" domains.
            mm_features: Media items sorted by offset: objects with `identifier` and
                `mm_position.offset` / `.length`, or (identifier, offset, length).
            lora_request: Adapter with `lora_name`, `lora_int_id` and perhaps `lora_path`, or None.
            cache_salt: Separates prefix caches; "" means none.
            priority: Kept.
            trace_headers: Kept.
            block_hasher: Who hashes; None leaves `block_hashes` empty.
            resumable: Kept.
            lora_path: The adapter's path; enters hashes under "tagged" domains.
            skip_reading_prefix_cache: None asks the parameters, as vLLM does.

        Raises:
            InvalidArgumentError: A token is negative or too large, media are out of order, or there
                is neither a prompt nor embeddings.
        """
    @property
    def request_id(self) -> str:
        """Its name."""
    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens."""
    @property
    def num_output_tokens(self) -> int:
        """Output tokens."""
    @property
    def all_token_ids(self) -> list[int]:
        """All tokens, as a fresh list."""
    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt, as a fresh list."""
    @property
    def output_token_ids(self) -> list[int]:
        """The outputs, as a fresh list."""
    @property
    def block_hashes(self) -> list[bytes]:
        """Hashes of the full blocks, as a fresh list; assign to set hashes made elsewhere."""
    @block_hashes.setter
    def block_hashes(self, value: Sequence[bytes]) -> None: ...
    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose keys and values exist; the scheduler sets it."""
    @num_computed_tokens.setter
    def num_computed_tokens(self, value: int) -> None: ...
    @property
    def num_in_flight_tokens(self) -> int:
        """Of the computed tokens, those whose step has not landed yet; the scheduler sets it."""
    @num_in_flight_tokens.setter
    def num_in_flight_tokens(self, value: int) -> None: ...
    @property
    def num_preemptions(self) -> int:
        """How often its blocks were taken away; the scheduler sets it."""
    @num_preemptions.setter
    def num_preemptions(self, value: int) -> None: ...
    @property
    def status(self) -> str:
        """Name of a vLLM `RequestStatus`; a name or an enum member can be assigned."""
    @status.setter
    def status(self, value: Any) -> None: ...
    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Whether lookups for it answer "no hit"."""
    @property
    def lora_request(self) -> Any:
        """The adapter as given."""
    @property
    def cache_salt(self) -> str | None:
        """The salt as given."""
    @property
    def mm_features(self) -> Any:
        """The media items as given."""
    @property
    def priority(self) -> int:
        """The priority as given."""
    @property
    def arrival_time(self) -> float:
        """Seconds since the epoch."""
    @property
    def client_index(self) -> int:
        """The client as given."""
    @property
    def prompt_embeds(self) -> Any:
        """The embeddings as given."""
    @property
    def resumable(self) -> bool:
        """Whether a streaming session may go on with it."""
    @property
    def trace_headers(self) -> Any:
        """The headers as given."""
    @property
    def sampling_params(self) -> Any:
        """The sampling parameters as given."""
    @property
    def pooling_params(self) -> Any:
        """The pooling parameters as given."""
    def append_output_token_ids(self, token_ids: int | Sequence[int]) -> None:
        """Append outputs and hash the blocks that they fill."""
    def truncate(self, num_tokens: int) -> None:
        """Drop all tokens from position `num_tokens` on, and the hashes of cut blocks.

        Raises:
            InvalidArgumentError: There are fewer tokens.
        """
    def extend_prompt(
        self, token_ids: Sequence[int], mm_features: Sequence[Any] | None = None
    ) -> None:
        """Go on with a streaming session: outputs so far become prompt, and new input follows.

        Args:
            token_ids: The new input.
            mm_features: Its media items, with offsets from its own start.

        Raises:
            InvalidArgumentError: A token is out of range, or media are out of order.
        """

@final
class KVCacheBlock:
    """One block of a pool. `pool.blocks[i]` is always the same object."""

    @property
    def block_id(self) -> int:
        """Its number; 0 is the null block."""
    @property
    def ref_cnt(self) -> int:
        """References to it now; always 0 for the null block."""
    @property
    def block_hash(self) -> bytes | None:
        """Its primary key now: digest and group id in four big-endian bytes; None if uncached."""
    @property
    def num_hash_tokens(self) -> int | None:
        """Prefix tokens that the primary key covers now; None if uncached."""
    @property
    def is_null(self) -> bool:
        """Whether it is the placeholder for positions without storage."""

@final
class KVCacheBlocks:
    """Blocks per group: an immutable snapshot, which later calls do not change.

    A manager makes them; `KVCacheManager.create_kv_cache_blocks` wraps blocks by hand.
    """

    @property
    def blocks(self) -> tuple[list[KVCacheBlock], ...]:
        """One fresh list per group."""
    @property
    def generation(self) -> int:
        """The pool's state that the snapshot was taken of; an outdated hit is refused by it."""
    @overload
    def get_block_ids(self, allow_none: Literal[False] = False) -> tuple[list[int], ...]: ...
    @overload
    def get_block_ids(self, allow_none: bool) -> tuple[list[int], ...] | None:
        """Ids as a tuple of fresh lists, one per group; null blocks are 0.

        Args:
            allow_none: Answer None where no group has a block.
        """
    def get_unhashed_block_ids(self) -> list[int]:
        """Ids of the blocks without a key.

        Raises:
            InvalidArgumentError: There is not exactly one group.
        """
    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """Ids of the blocks without a key, per group, null blocks left out."""
    def new_empty(self) -> KVCacheBlocks:
        """A new object with as many groups and no blocks."""
    def __add__(self, value: KVCacheBlocks, /) -> KVCacheBlocks:
        """The blocks of both, per group.

        Raises:
            InvalidArgumentError: The numbers of groups differ.
        """
    def __radd__(self, value: KVCacheBlocks, /) -> KVCacheBlocks: ...
    def __eq__(self, other: object, /) -> bool: ...

@final
class BlockLease(Sequence[KVCacheBlock]):
    """The blocks of a request that was taken out of a manager, and the duty to give them back.

    `iter` and `reversed` carry the lease: given to `BlockPool.free_blocks`, they release it whole.
    A plain list copied from it (a slice, or a walk to its end) dissolves it: its references are
    then only counted, for `free_blocks` to take back by block.

    A lease that is garbage-collected unreleased gives nothing back, because a step in flight may
    still read its blocks: they stay held, a `ResourceWarning` names them, and
    `KVCacheManager.lost_leases` lists them.
    """

    @property
    def request_id(self) -> str:
        """Whose blocks they were."""
    @property
    def released(self) -> bool:
        """Whether they were given back."""
    @property
    def group_bounds(self) -> list[int]:
        """Where each group ends, as positions in the lease."""
    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, index: int, /) -> KVCacheBlock: ...
    @overload
    def __getitem__(self, index: slice, /) -> list[KVCacheBlock]: ...
    def __iter__(self) -> BlockLeaseIterator: ...
    def __reversed__(self) -> BlockLeaseIterator: ...

@final
class BlockLeaseIterator:
    """A walk over a lease that still knows whose it is."""

    def __iter__(self) -> Self: ...
    def __next__(self) -> KVCacheBlock: ...
    def __length_hint__(self) -> int: ...

@final
class LostLease:
    """What is known of a lease that was garbage-collected unreleased."""

    @property
    def request_id(self) -> str:
        """Whose blocks they were."""
    @property
    def block_ids(self) -> tuple[int, ...]:
        """The blocks that stay held, in table order, null blocks left out."""

@final
class PoolBlocks(Sequence[KVCacheBlock]):
    """All blocks of a pool by id; each is made when it is first asked for."""

    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, index: int, /) -> KVCacheBlock: ...
    @overload
    def __getitem__(self, index: slice, /) -> list[KVCacheBlock]: ...

@final
class FreeBlockQueue:
    """The free blocks, next victim first."""

    @property
    def num_free_blocks(self) -> int:
        """How many there are."""
    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """All of them, head first; for tests and diagnosis."""

@final
class CachedBlocks:
    """The prefix map: keys (digest and group id in four big-endian bytes) to blocks."""

    def get_one_block(self, key: bytes) -> KVCacheBlock | None:
        """The earliest inserted block that carries the key, or None."""
    def contain(self, key: bytes, block_id: int) -> bool:
        """Whether this block carries the key."""
    def __len__(self) -> int:
        """Number of distinct keys."""

@final
class BlockPool:
    """All blocks of one KV cache: who is free, in which order, and what is cached in them."""

    def __new__(
        cls,
        num_gpu_blocks: int,
        enable_caching: bool,
        hash_block_size: int,
        enable_kv_cache_events: bool = False,
        metrics_collector: KVCacheMetricsCollector | None = None,
        semantics: Semantics = ...,
        event_groups: Sequence[int] | None = None,
        min_event_block_tokens: int = 0,
    ) -> Self:
        """Make a pool with blocks 1 to `num_gpu_blocks - 1` free, in ascending order.

        Args:
            num_gpu_blocks: Blocks, the null block included.
            enable_caching: Whether blocks may be found again by their hashes.
            hash_block_size: Tokens per hash of a request.
            enable_kv_cache_events: Whether `take_events` has something to say.
            metrics_collector: Samples how long blocks live, or None.
            semantics: Default `Semantics.corrected()`.
            event_groups: Groups whose changes are told; None: all.
            min_event_block_tokens: Fewest tokens of a block that a key must cover to be told:
                leaves out groups of smaller blocks, and boundaries near the start of a block. A
                reset is always told.

        Raises:
            ConfigError: A size is not positive.
        """
    @property
    def num_gpu_blocks(self) -> int:
        """Blocks, the null block included."""
    @property
    def enable_caching(self) -> bool:
        """Whether blocks may be found again."""
    @property
    def hash_block_size(self) -> int:
        """Tokens per hash of a request."""
    @property
    def enable_kv_cache_events(self) -> bool:
        """Whether events are kept."""
    @property
    def null_block(self) -> KVCacheBlock:
        """Block 0, the placeholder."""
    @property
    def metrics_collector(self) -> KVCacheMetricsCollector | None:
        """The collector as given."""
    @property
    def blocks(self) -> PoolBlocks:
        """All blocks by id."""
    @property
    def free_block_queue(self) -> FreeBlockQueue:
        """The free blocks."""
    @property
    def cached_block_hash_to_block(self) -> CachedBlocks:
        """The prefix map."""
    @property
    def num_blocks_stored(self) -> int:
        """How many times a block got its key, since the pool was made."""
    @property
    def num_blocks_removed(self) -> int:
        """How many times a block lost its key, since the pool was made."""
    def get_cached_block(
        self, block_hash: bytes, kv_cache_group_ids: Sequence[int]
    ) -> list[KVCacheBlock] | None:
        """One block per group that carries the hash, or None where any group has none.

        Args:
            block_hash: The digest.
            kv_cache_group_ids: The groups, in the order of the answer.

        Raises:
            InvalidArgumentError: A group id is out of range, or the digest has another width.
        """
    def cache_full_blocks(
        self,
        request: _Request,
        blocks: Sequence[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: Sequence[bool] | None = None,
    ) -> None:
        """Give the blocks at positions `[num_cached_blocks, num_full_blocks)` their keys.

        Args:
            request: Whose tokens and hashes they hold.
            blocks: The request's whole table in that group.
            num_cached_blocks: First position.
            num_full_blocks: Position after the last.
            block_size: Tokens per block of the group.
            kv_cache_group_id: The group.
            block_mask: Which of the positions to store; None means all but null blocks.

        Raises:
            InvalidArgumentError: Mask or positions do not fit, or hashes are missing.
            HashConflictError: A block has a key for a whole block already.
            NotOwnedError: Nobody holds a block.
        """
    def cache_partial_block(
        self,
        request: _Request,
        block: KVCacheBlock,
        num_tokens: int,
        kv_cache_group_id: int,
        block_size: int,
    ) -> bytes | None:
        """Make a block reachable at a boundary inside it.

        Args:
            request: Whose tokens and hashes it holds.
            block: The block; the null block is left alone and the answer is None.
            num_tokens: Prefix tokens at the boundary: a multiple of the hash block size, not of
                `block_size`.
            kv_cache_group_id: The group.
            block_size: Tokens per block of the group.

        Returns:
            The key.

        Raises:
            InvalidArgumentError: The boundary is not one, or hashes are missing.
            NotOwnedError: Nobody holds the block.
        """
    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks from the head of the queue; the caller holds one reference to each.

        Raises:
            InvalidArgumentError: The number is negative.
            OutOfBlocksError: There are not as many.
        """
    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Take one more reference to each; the caller holds it.

        Raises:
            StaleBlockError: A block is free and carries no key.
            ForeignBlockError: A block is of another pool.
        """
    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Give back one reference per occurrence, next victim first.

        Blocks that nobody holds any more go to the queue: those without a key to its head, the
        others to its tail (vLLM `BlockPool.free_blocks`). Only references that were handed out
        outside the manager are taken.

        Raises:
            DoubleFreeError: More references than were handed out.
            NotOwnedError: The block was never handed out.
            ForeignBlockError: A block is of another pool.
        """
    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Take the keys of these blocks, in the order given; queue and references stay.

        Raises:
            InvalidArgumentError: There is no such block.
        """
    def reset_prefix_cache(self) -> bool:
        """Forget all keys; False, and nothing done, while any block is held."""
    def get_num_free_blocks(self) -> int:
        """Blocks in the queue, cached ones included."""
    def get_usage(self) -> float:
        """Held blocks as a share of all but the null block, 0 to 1."""
    def take_events(self) -> list[KVCacheEvent]:
        """Events since the last call, oldest first, without the group's kind."""
    def take_event_batch(
        self,
        wire_format: str = "router",
        data_parallel_rank: int | None = 0,
        ts: float | None = None,
    ) -> bytes | None:
        """The events since the last call as one msgpack payload; None if there are none.

        What `take_events` answers, encoded without Python objects; whichever of the two is called
        takes the events. Other threads can run meanwhile where there are many.

        Args:
            wire_format: A `kvyard.events.WireFormat`.
            data_parallel_rank: The engine's rank; None only in vLLM's formats, which say nil then.
            ts: Seconds since the epoch; None: now.

        Raises:
            InvalidArgumentError: No such format, or no rank where routers need one.
        """
    def validate(self) -> None:
        """Check every invariant; for tests, it walks all blocks.

        Raises:
            InvariantError: One is broken; the message names it.
        """
    def state_digest(self) -> str:
        """A digest of the whole state: equal states have equal digests."""

@final
class LiveSet:
    """The encoded store of each live block, so that a consumer that comes late can be told all.

    It is fed with every payload that goes out, in order. `len` is the number of live (hash, group)
    pairs. Memory follows that number, not the length of the stream; see docs/events.md for bytes a
    block. One may be used by several threads.
    """

    def __new__(cls, removal_event: str = "last_copy") -> Self:
        """Make an empty set.

        Args:
            removal_event: As in the pool's `Semantics`: "last_copy", one removal when no copy of a
                hash is left, or "every_copy", one a copy, as vLLM 0.25.1.

        Raises:
            InvalidArgumentError: It is neither.
        """
    def apply(self, payload: bytes | bytearray | memoryview) -> None:
        """Take in the next payload.

        Raises:
            EventDecodeError: It is no batch of events; nothing was taken in.
        """
    def clear(self) -> None:
        """Forget everything, as after AllBlocksCleared."""
    def dump(
        self, ts: float, data_parallel_rank: int | None = 0, wire_format: str = "router"
    ) -> list[bytes]:
        """Batches that tell an empty consumer all that is live; none for an empty set.

        Each store is of one block, parents come before children, and a parent that is gone is named
        as the nearest ancestor that is live, or None. With "every_copy", a block is stored as often
        as it has copies. A masked span of vLLM's, whose tokens do not match its hashes, is told
        without tokens.

        Args:
            ts: Seconds since the epoch, of each batch.
            data_parallel_rank: The engine's rank; None only in vLLM's formats.
            wire_format: A `kvyard.events.WireFormat`, whichever the payloads had.

        Raises:
            InvalidArgumentError: No such format, or no rank where routers need one.
        """
    @property
    def latest_ts(self) -> float:
        """The latest `ts` of a payload taken in, in seconds since the epoch; 0.0 before any."""
    @property
    def num_bytes(self) -> int:
        """Bytes that the set takes, the allocator's own use estimated."""
    def __len__(self) -> int: ...

@final
class KVCacheEvictionEvent:
    """The life of one sampled block, told when it was evicted."""

    @property
    def lifetime_seconds(self) -> float:
        """From allocation to eviction."""
    @property
    def idle_seconds(self) -> float:
        """From the last use to eviction."""
    @property
    def reuse_gaps_seconds(self) -> tuple[float, ...]:
        """Between the last uses, four at most."""

@final
class KVCacheMetricsCollector:
    """Samples how long blocks live (vLLM `v1/core/kv_cache_metrics.py`)."""

    def __new__(cls, sample_rate: float = 0.01, seed: int | None = None) -> Self:
        """Make a collector.

        Args:
            sample_rate: Share of the allocations that are followed, in (0, 1].
            seed: Makes the choice repeatable; None takes it from the operating system.

        Raises:
            ConfigError: The rate is out of range.
        """
    @property
    def sample_rate(self) -> float:
        """Share of the allocations that are followed."""
    def drain_events(self) -> list[KVCacheEvictionEvent]:
        """Evictions since the last call."""
    def reset(self) -> None:
        """Forget all samples and events."""

@final
class PrefixCacheStats:
    """How lookups went, in requests and tokens; preempted requests are counted apart."""

    @property
    def reset(self) -> bool:
        """Whether the prefix cache was reset since the last statistics."""
    @property
    def requests(self) -> int:
        """Requests counted."""
    @property
    def queries(self) -> int:
        """Their tokens."""
    @property
    def hits(self) -> int:
        """Their tokens that were cached."""
    @property
    def preempted_requests(self) -> int:
        """Requests that had been preempted."""
    @property
    def preempted_queries(self) -> int:
        """Their tokens."""
    @property
    def preempted_hits(self) -> int:
        """Their tokens that were cached."""

@final
class PrefixIndex:
    """How many leading tokens of a prompt does each worker hold?

    Fed by the events of any number of workers, of vLLM, SGLang or kvyard, with any block sizes. It
    goes by the tokens that stores tell, so that nobody's hashes need to be computed again. A worker
    of several groups holds a prefix where all of them agree: full attention needs every block, a
    sliding window those it covers, Mamba and chunked local attention the last one. Blocks on a
    medium other than "GPU" (or None) do not count. A block whose parent is unknown counts once the
    parent is told. One index may be used by several threads; `len` is the number of workers.
    """

    def __new__(cls, removal_event: str = "last_copy") -> Self:
        """Make an index of no workers.

        Args:
            removal_event: How workers tell removals unless `add_worker` says otherwise: "last_copy"
                for SGLang and kvyard's default semantics, "every_copy" for vLLM.

        Raises:
            InvalidArgumentError: It is neither.
        """
    def add_worker(self, worker: Hashable, removal_event: str | None = None) -> None:
        """Make a worker known before its first batch, or one that tells removals in its own way.

        Args:
            worker: Any hashable name, such as (host, data-parallel rank).
            removal_event: As in the constructor; None: the constructor's.

        Raises:
            InvalidArgumentError: The worker is known already.
        """
    def remove_worker(self, worker: Hashable) -> None:
        """Forget a worker and what it holds; an unknown one is none."""
    def apply(self, worker: Hashable, batch: bytes | bytearray | memoryview | KVEventBatch) -> None:
        """Take in a worker's next batch, as payload or decoded; an unknown worker becomes known.

        A worker that starts again is followed if it sends AllBlocksCleared first.

        Raises:
            EventDecodeError: The payload is no batch of events; nothing was taken in.
            InvalidArgumentError: It is neither bytes nor a batch.
        """
    def matched_tokens(
        self,
        token_ids: Iterable[int],
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        extra_keys: Sequence[tuple[str, int]] | None = None,
    ) -> dict[Any, int]:
        """Leading tokens that each known worker holds, 0 for none.

        Args:
            token_ids: The prompt.
            lora_name: The adapter's name; for a worker that tells only its number, that as text.
            cache_salt: The request's salt.
            extra_keys: Media items: identifier and position of the first token in the prompt, in
                the order of the positions.

        Raises:
            InvalidArgumentError: A token is no int of 32 bits, or items are out of order.
        """
    def num_blocks(self, worker: Hashable) -> int:
        """Blocks that a worker holds, all groups together; 0 for an unknown one."""
    @property
    def num_bytes(self) -> int:
        """Bytes that the index takes, the allocator's own use not counted."""
    def __len__(self) -> int: ...

@final
class CacheHit:
    """What `KVCacheManager.lookup` found."""

    @property
    def blocks(self) -> KVCacheBlocks:
        """The blocks per group; not pinned."""
    @property
    def num_tokens(self) -> int:
        """Tokens that need not be computed."""
    @property
    def num_uncached_common_prefix_tokens(self) -> int:
        """By how much the deepest group's hit exceeded the agreed one, in tokens."""
    @property
    def epoch(self) -> int:
        """The pool's state at the lookup."""

@final
class KVCacheManager:
    """Hands out KV-cache blocks to requests and finds prefixes that are cached already."""

    def __new__(
        cls,
        kv_cache_config: _KVCacheConfig,
        max_model_len: int,
        scheduler_block_size: int | None = None,
        hash_block_size: int | None = None,
        max_num_batched_tokens: int | None = None,
        enable_caching: bool = True,
        use_eagle: bool = False,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        metrics_collector: KVCacheMetricsCollector | None = None,
        watermark: float = 0.0,
        semantics: Semantics = ...,
        track_new_blocks: bool = True,
        retention_interval: int | None = None,
        event_groups: Sequence[int] | None = None,
        min_event_block_tokens: int = 0,
        verify_tokens: bool = False,
    ) -> Self:
        """Make a manager with an empty pool.

        Args:
            kv_cache_config: kvyard's `KVCacheConfig` or vLLM's.
            max_model_len: Longest sequence in tokens.
            scheduler_block_size: Tokens that hits are aligned to; None derives it.
            hash_block_size: Tokens per hash of a request; None derives it.
            max_num_batched_tokens: Tokens per step; None means `max_model_len`.
            enable_caching: Whether prefixes are looked up and kept.
            use_eagle: Whether a drafter needs the last matched block computed again.
            log_stats: Whether `make_prefix_cache_stats` has something to say.
            enable_kv_cache_events: Whether `take_events` has something to say.
            dcp_world_size: Ranks of decode context parallelism; a block spans all of them.
            pcp_world_size: Ranks of prefill context parallelism; a block spans all of them.
            metrics_collector: Samples how long blocks live, or None.
            watermark: Share of `num_blocks` kept free when a waiting request is admitted.
            semantics: Default `Semantics.corrected()`.
            track_new_blocks: False where nobody calls `take_new_block_ids`, which would grow.
            retention_interval: Tokens between the boundaries at which window and Mamba groups stay
                cached; 0 keeps the prompt's last one only, None all. vLLM reads it from
                VLLM_PREFIX_CACHE_RETENTION_INTERVAL.
            event_groups: Groups whose changes are told; None: all.
            min_event_block_tokens: Fewest tokens of a block that a key must cover to be told:
                leaves out groups of smaller blocks, and boundaries near the start of a block. A
                reset is always told.
            verify_tokens: Whether a hit must also agree in a second fingerprint of its tokens and
                extra keys, keyed per process, so that colliding or forged block hashes never
                serve another prefix. Takes 16 bytes a block.

        Raises:
            ConfigError: Sizes do not divide, or a spec's kind is not supported; it is named.
        """
    @property
    def kv_cache_config(self) -> Any:
        """The configuration as given."""
    @property
    def block_pool(self) -> BlockPool:
        """The pool."""
    @property
    def empty_kv_cache_blocks(self) -> KVCacheBlocks:
        """The one empty object, which answers without blocks are."""
    @property
    def usage(self) -> float:
        """Held blocks as a share of all but the null block, 0 to 1."""
    @property
    def log_stats(self) -> bool:
        """Whether statistics are kept."""
    @property
    def enable_caching(self) -> bool:
        """Whether prefixes are kept."""
    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens."""
    @property
    def num_kv_cache_groups(self) -> int:
        """Number of groups."""
    @property
    def prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Statistics so far; None without `log_stats`."""
    @property
    def semantics(self) -> Semantics:
        """Whose decisions it takes."""
    @property
    def watermark_blocks(self) -> int:
        """Blocks kept free when a waiting request is admitted."""
    def get_computed_blocks(self, request: _Request) -> tuple[KVCacheBlocks, int]:
        """The longest cached prefix, the last token never included.

        Nothing is pinned: use the result before the next allocation, which refuses a stale one
        (vLLM `KVCacheManager.get_computed_blocks`).

        Returns:
            Blocks per group and the length in tokens.
        """
    def lookup(self, request: _Request) -> CacheHit:
        """As `get_computed_blocks`, with all that a lookup finds."""
    def find_longest_cache_hit_per_group(
        self, request: _Request, max_cache_hit_length: int
    ) -> tuple[KVCacheBlocks, list[int]]:
        """Each group's own longest hit, and its length in tokens per group.

        Args:
            request: The request.
            max_cache_hit_length: Longest hit in tokens.
        """
    @property
    def num_uncached_common_prefix_tokens(self) -> int:
        """`CacheHit.num_uncached_common_prefix_tokens` of the last lookup."""
    def allocate_slots(
        self,
        request: _Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        num_in_flight_tokens: int = 0,
    ) -> KVCacheBlocks | None:
        """Blocks for the tokens of the next step (vLLM `KVCacheManager.allocate_slots`).

        A refusal changes nothing, except that blocks which no later token can read are released.

        Args:
            request: The request; tokens up to `num_computed_tokens` are held already.
            num_new_tokens: Tokens to compute, drafts included; 0 only with external tokens.
            num_new_computed_tokens: Tokens of the prefix hit just found.
            new_computed_blocks: The blocks of that hit; only for a request without blocks.
            num_lookahead_tokens: Further slots for a drafter.
            num_external_computed_tokens: Tokens that a connector supplies after the hit.
            delay_cache_blocks: Whether full blocks get their keys later, by `cache_blocks`.
            num_encoder_tokens: Tokens of an encoder; for cross attention.
            full_sequence_must_fit: Refuse unless the whole request would fit now.
            reserved_blocks: Free blocks that this call must leave.
            has_scheduled_reqs: Whether the watermark applies to a waiting request.
            num_in_flight_tokens: Computed tokens whose step has not landed, so that their window
                is kept; 0 leaves it to the request's own field.

        Returns:
            The new blocks, without those of the hit and of external tokens, or None where they do
            not fit.

        Raises:
            InvalidArgumentError: There is nothing to do, a count is negative, or hit and count
                disagree.
            AlreadyTrackedError: A hit for a request that has blocks.
            StaleBlockError: The hit is out of date.
            ForeignBlockError: The hit is another manager's.
        """
    def free(self, request: _Request, num_written_tokens: int | None = None) -> None:
        """Release a request's blocks, tail first; an unknown request is no error.

        Args:
            request: The request.
            num_written_tokens: Tokens whose keys and values were really written; blocks beyond
                them lose their keys. None means all.
        """
    def pop_blocks_for_free(self, request: _Request) -> BlockLease:
        """Take a request out and hand its blocks to the caller, who gives them back later."""
    def free_popped(self, lease: BlockLease) -> None:
        """Give a lease's blocks back, in the order that the semantics say.

        Raises:
            DoubleFreeError: They were given back already.
            ForeignBlockError: The lease is another manager's.
        """
    def lost_leases(self) -> list[LostLease]:
        """Leases that were garbage-collected unreleased, oldest first; their blocks stay held."""
    def reclaim(self, lease: LostLease) -> None:
        """Give the blocks of a lost lease back, once no step in flight can read them.

        Raises:
            DoubleFreeError: They were reclaimed already.
            ForeignBlockError: The lease is another manager's.
        """
    def remove_skipped_blocks(
        self,
        request_id: str,
        total_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Release blocks that no token after `total_computed_tokens` will read."""
    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """See `BlockPool.evict_blocks`."""
    def cache_blocks(self, request: _Request, num_computed_tokens: int) -> None:
        """Give the full blocks of the first `num_computed_tokens` tokens their keys.

        Raises:
            UnknownRequestError: The request holds no blocks.
            InvalidArgumentError: Hashes or blocks are missing.
        """
    def reset_prefix_cache(self) -> bool:
        """Forget all keys; False, and nothing done, while any block is held.

        Then a warning of the logger "kvyard" says who holds what.
        """
    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Per group, leading blocks that all requests share with this one; 0 if it is unknown."""
    def take_events(self) -> list[KVCacheEvent]:
        """Events since the last call, oldest first, with each group's kind."""
    def take_event_batch(
        self,
        wire_format: str = "router",
        data_parallel_rank: int | None = 0,
        ts: float | None = None,
    ) -> bytes | None:
        """The events since the last call as one msgpack payload; None if there are none.

        What `take_events` answers, encoded without Python objects; whichever of the two is called
        takes the events. Other threads can run meanwhile where there are many.

        Args:
            wire_format: A `kvyard.events.WireFormat`.
            data_parallel_rank: The engine's rank; None only in vLLM's formats, which say nil then.
            ts: Seconds since the epoch; None: now.

        Raises:
            InvalidArgumentError: No such format, or no rank where routers need one.
        """
    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """A snapshot of a request's table; the shared empty object if it is unknown."""
    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Ids of a request's table, per group."""
    def get_block_ids_for_computed_tokens(
        self, request_id: str, num_computed_tokens: int
    ) -> tuple[list[int], ...]:
        """Ids of the leading blocks that hold so many tokens, per group."""
    def take_new_block_ids(self) -> list[int]:
        """Ids allocated since the last call in groups whose new blocks need zeroing."""
    def new_step_starts(self) -> None:
        """Tell the manager that a scheduling step begins."""
    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Statistics since the last call; None without `log_stats`."""
    def create_kv_cache_blocks(self, blocks: Sequence[Sequence[KVCacheBlock]]) -> KVCacheBlocks:
        """Wrap blocks, one sequence per group; the shared empty object if there are none."""
    def validate(self) -> None:
        """Check every invariant; for tests, it walks all blocks.

        Raises:
            InvariantError: One is broken; the message names it.
        """
    def audit(self, budget: int = 1000) -> int:
        """Check a slice of the invariants, going on where the last call stopped.

        Cheap enough to be called at every step: `docs/ownership.md` has the figures.

        Args:
            budget: Memory accesses, roughly; each takes some nanoseconds.

        Returns:
            How often everything was checked since the manager was made.

        Raises:
            InvariantError: One is broken; its `report` is for `kvyard explain`.
        """
    def report(self) -> str:
        """Who holds what and the last 256 operations, as JSON for `kvyard explain`.

        Works on a poisoned manager too.
        """
    def state_digest(self) -> str:
        """A digest of the whole state: equal states have equal digests."""
