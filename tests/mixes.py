"""Random mixtures of groups, for kvyard and for the reference model."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import kvyard
from hypothesis import strategies as st

from tests import helpers
from tests.model.manager import GroupSpec, KVCacheManager, Sizes
from tests.twins import named_semantics, semantics_of_model

if TYPE_CHECKING:
    from collections.abc import Callable

# The fields of the semantics that several groups can tell; each is flipped alone.
GROUP_FIELDS = [
    "eagle_credit",
    "eagle_retention",
    "common_prefix",
    "removal_event",
    "sparse_store_event",
    "deferred_free_order",
    "gate_counts_lookahead",
    "align_prediction",
]
SPARSE = ("sliding_window", "sliding_window_mla", "mamba")
# Configurations in which 0.25.1 itself breaks: cases C01 and C08, W2 of manager 11.
HAZARDS = ["two full", "states and drafter", "external states", "chunks and drafter"]

semantics_choices = st.builds(
    named_semantics,
    st.sampled_from(["corrected", "vllm_0_25_1"]),
    st.sampled_from([None] * 5 + GROUP_FIELDS),
)


@dataclass(frozen=True)
class Mix:
    """A configuration of both managers."""

    groups: list[GroupSpec]
    num_blocks: int
    sizes: Sizes
    hash_block_size: int
    caching: bool
    use_eagle: bool
    events: bool
    watermark: float
    semantics: kvyard.Semantics
    verify_tokens: bool

    @property
    def most_drafts(self) -> int:
        """Drafts in a step: a Mamba group can take back as many as it has states for."""
        return min(
            [spec.num_speculative_blocks for spec in self.groups if spec.kind == "mamba"] + [3]
        )

    @property
    def has_cross_attention(self) -> bool:
        return any(spec.kind == "cross_attention" for spec in self.groups)

    def make_ours(self) -> kvyard.KVCacheManager:
        groups = [
            kvyard.KVCacheGroupSpec([f"layer.{i}"], as_kvyard(spec), spec.is_eagle_group)
            for i, spec in enumerate(self.groups)
        ]
        return kvyard.KVCacheManager(
            kvyard.KVCacheConfig(self.num_blocks, [], groups),
            max_model_len=self.sizes.max_model_len,
            scheduler_block_size=self.sizes.scheduler_block_size,
            hash_block_size=self.hash_block_size,
            max_num_batched_tokens=self.sizes.max_num_batched_tokens,
            enable_caching=self.caching,
            use_eagle=self.use_eagle,
            enable_kv_cache_events=self.events,
            watermark=self.watermark,
            semantics=self.semantics,
            retention_interval=self.sizes.retention_interval,
            verify_tokens=self.verify_tokens,
        )

    def make_theirs(self) -> KVCacheManager:
        return KVCacheManager(
            self.num_blocks,
            self.groups,
            self.sizes,
            self.hash_block_size,
            semantics_of_model(self.semantics),
            self.caching,
            self.use_eagle,
            self.events,
            self.watermark,
        )


def as_kvyard(spec: GroupSpec) -> kvyard.KVCacheSpec:
    """The same spec for kvyard; layouts differ in the number of heads."""
    attention: dict[str, Any] = {
        **helpers.ATTENTION,
        "num_kv_heads": 1 + spec.layout,
        "block_size": spec.block_size,
    }
    kinds: dict[str, Callable[[], kvyard.KVCacheSpec]] = {
        "full_attention": lambda: kvyard.FullAttentionSpec(**attention),
        "mla_attention": lambda: kvyard.MLAAttentionSpec(**attention),
        "rswa": lambda: kvyard.RSWASpec(rswa_window=spec.rswa_window, **attention),
        "sink_full_attention": lambda: kvyard.SinkFullAttentionSpec(
            sink_len=spec.sink_len, **attention
        ),
        "sliding_window": lambda: kvyard.SlidingWindowSpec(
            sliding_window=spec.sliding_window, **attention
        ),
        "sliding_window_mla": lambda: kvyard.SlidingWindowMLASpec(
            sliding_window=spec.sliding_window, **attention
        ),
        "chunked_local_attention": lambda: kvyard.ChunkedLocalAttentionSpec(
            attention_chunk_size=spec.attention_chunk_size, **attention
        ),
        "mamba": lambda: kvyard.MambaSpec(
            block_size=spec.block_size,
            shapes=((8, 8 + spec.layout),),
            dtypes=("bfloat16",),
            mamba_cache_mode=spec.mamba_cache_mode,
            num_speculative_blocks=spec.num_speculative_blocks,
        ),
        "cross_attention": lambda: kvyard.CrossAttentionSpec(**attention),
    }
    return kinds[spec.kind]()


@st.composite
def group_specs(draw: st.DrawFn, kinds: list[str], block_sizes: list[int]) -> GroupSpec:
    """A spec of one of the kinds."""
    kind = draw(st.sampled_from(kinds))
    size = draw(st.sampled_from(block_sizes))
    spec = GroupSpec(kind, size, layout=draw(st.sampled_from([0, 0, 0, 1])))
    if kind == "rswa":
        return replace(spec, rswa_window=draw(st.integers(1, 6)))
    if kind == "sink_full_attention":
        return replace(spec, sink_len=size * draw(st.integers(1, 2)))
    if kind in ("sliding_window", "sliding_window_mla"):
        return replace(spec, sliding_window=draw(st.integers(1, 3 * size + 1)))
    if kind == "chunked_local_attention":
        aligned = draw(st.integers(0, 3))  # mostly
        chunk = size * draw(st.integers(1, 3)) if aligned else draw(st.integers(1, 3 * size))
        return replace(spec, attention_chunk_size=chunk)
    if kind == "mamba":
        mode = draw(st.sampled_from(["align", "align", "all", "none"]))
        drafts = draw(st.sampled_from([0, 1, 2, 3]))
        return replace(spec, mamba_cache_mode=mode, num_speculative_blocks=drafts)
    return spec


def hazard_groups(draw: st.DrawFn, hazard: str, block_sizes: list[int]) -> list[GroupSpec]:
    """The groups that make the hazard."""
    full = GroupSpec("full_attention", draw(st.sampled_from(block_sizes)))
    if hazard == "two full":
        other = GroupSpec("full_attention", draw(st.sampled_from(block_sizes)), layout=1)
        third = ["sliding_window", "mamba", "chunked_local_attention"]
        return [full, other, draw(group_specs(third, block_sizes))]
    if hazard == "chunks and drafter":
        return [full, draw(group_specs(["chunked_local_attention"], block_sizes))]
    state = draw(group_specs(["mamba"], block_sizes))
    if hazard == "external states":
        drafts = draw(st.integers(0, 3))
        state = replace(state, mamba_cache_mode="align", num_speculative_blocks=drafts)
    return draw(st.sampled_from([[full, state], [state, full]]))


@st.composite
def mixes(draw: st.DrawFn, hazard: str | None = None) -> Mix:
    """Two to five groups."""
    largest = draw(st.sampled_from([2, 3, 4, 4, 6, 8, 8, 12]))
    divisors = [size for size in range(1, largest + 1) if largest % size == 0]
    block_sizes = [size for size in divisors if size * 4 >= largest]
    caching = hazard is not None or draw(st.integers(0, 6)) > 0
    kinds = ["full_attention", "mla_attention", "rswa", "sliding_window", "sliding_window"]
    kinds += ["sliding_window_mla", "chunked_local_attention", "mamba", "mamba"]
    kinds += [] if caching else ["cross_attention", "cross_attention"]
    groups = [] if hazard is None else hazard_groups(draw, hazard, block_sizes)
    count = draw(st.integers(max(2, len(groups)), 5 if hazard is None else 4))
    while len(groups) < count:
        # A spec that is there already shares its bucket.
        again = groups and draw(st.integers(0, 4)) == 0
        spec = draw(st.sampled_from(groups) if again else group_specs(kinds, block_sizes))
        groups.append(replace(spec, is_eagle_group=False))
    if draw(st.integers(0, 9)) == 0:  # only one group can have sinks
        groups[-1] = draw(group_specs(["sink_full_attention"], block_sizes))
    eagle = draw(st.sampled_from(["", "", "all", "flags", "flags without a drafter"]))
    if hazard is not None and "drafter" in hazard:
        eagle = "all"
    if "flags" in eagle:
        groups = [replace(spec, is_eagle_group=draw(st.booleans())) for spec in groups]
    return _sized(draw, groups, caching, use_eagle=eagle in ("all", "flags"))


def _sized(draw: st.DrawFn, groups: list[GroupSpec], caching: bool, use_eagle: bool) -> Mix:
    """Block sizes, limits, and a pool that is sometimes too small."""
    block_sizes = [spec.block_size for spec in groups]
    aligned = math.lcm(*block_sizes) * draw(st.sampled_from([1, 1, 1, 2]))
    common = math.gcd(*block_sizes)
    hash_sizes = [size for size in range(1, common + 1) if common % size == 0]
    retention = None
    if any(spec.kind in SPARSE for spec in groups):
        retention = draw(st.sampled_from([None, None, 0, 1, 2, 3]))
    longest = draw(st.integers(16, 64))
    # Enough for one long request, or for several short ones, or for neither.
    one = sum(-(-min(longest, 32) // size) for size in block_sizes)
    sinks = sum(spec.sink_len // spec.block_size for spec in groups)
    return Mix(
        groups,
        num_blocks=1 + sinks + min(120, one * draw(st.integers(3, 16)) // 4 + 1),
        sizes=Sizes(
            max_model_len=longest,
            scheduler_block_size=aligned,
            max_num_batched_tokens=draw(st.sampled_from([4, 8, 16, 64, 64])),
            retention_interval=None if retention is None else retention * aligned,
        ),
        hash_block_size=draw(st.sampled_from(hash_sizes)),
        caching=caching,
        use_eagle=use_eagle,
        events=draw(st.booleans()),
        watermark=draw(st.sampled_from([0.0, 0.0, 0.0, 0.1])),
        semantics=(semantics := draw(semantics_choices)),
        # Under 0.25.1's faults other tokens may stand under a hash; then verified hits differ.
        verify_tokens=semantics == kvyard.Semantics.corrected() and draw(st.booleans()),
    )


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Token lists that often share a prefix of several scheduler blocks."""
    base = draw(st.sampled_from([0, 0, 0, 0, 100]))
    shared = draw(st.one_of(st.integers(16, 48), st.integers(16, 48), st.integers(0, 48)))
    own = draw(st.integers(0 if shared else 1, 6))
    first = draw(st.integers(70_000, 70_002))
    return list(range(base, base + shared)) + list(range(first, first + own))
