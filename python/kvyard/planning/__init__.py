"""The memory planner: from the specs of layers and bytes of memory to a `KVCacheConfig`.

`plan_kv_cache` is the whole way::

    from kvyard.kv_cache_interface import FullAttentionSpec
    from kvyard.planning import PlanningConfig, plan_kv_cache

    spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16")
    layers = {f"layer.{i}": spec for i in range(32)}
    plan = plan_kv_cache(PlanningConfig(max_model_len=8192), [layers], [10 << 30])
    plan.scheduler_kv_cache_config.num_blocks  # 5120

Its results are vLLM 0.25.1's where that has any, layouts included. It differs in what it refuses:
see `Semantics.planner_reserves_null` and `Semantics.group_merge`; and a refusal says what to
change.
"""

from kvyard.planning.block_sizes import (
    add_kv_sharing_layers_to_kv_cache_groups,
    generate_scheduler_kv_cache_config,
    resolve_kv_cache_block_sizes,
)
from kvyard.planning.grouping import (
    get_kv_cache_groups,
    is_kv_cache_spec_uniform,
    unify_hybrid_kv_cache_specs,
)
from kvyard.planning.memory import (
    check_enough_kv_cache_memory,
    estimate_max_model_len,
    get_kv_cache_capacity,
    get_max_concurrency_for_kv_cache_config,
    max_memory_usage_bytes,
    num_reserved_blocks,
)
from kvyard.planning.page_size import unify_kv_cache_spec_page_size
from kvyard.planning.plan import Plan, get_kv_cache_configs, plan_kv_cache
from kvyard.planning.tensors import bytes_per_block, get_kv_cache_config_from_groups
from kvyard.specs.planning_config import PlanningConfig

__all__ = [
    "Plan",
    "PlanningConfig",
    "add_kv_sharing_layers_to_kv_cache_groups",
    "bytes_per_block",
    "check_enough_kv_cache_memory",
    "estimate_max_model_len",
    "generate_scheduler_kv_cache_config",
    "get_kv_cache_capacity",
    "get_kv_cache_config_from_groups",
    "get_kv_cache_configs",
    "get_kv_cache_groups",
    "get_max_concurrency_for_kv_cache_config",
    "is_kv_cache_spec_uniform",
    "max_memory_usage_bytes",
    "num_reserved_blocks",
    "plan_kv_cache",
    "resolve_kv_cache_block_sizes",
    "unify_hybrid_kv_cache_specs",
    "unify_kv_cache_spec_page_size",
]
