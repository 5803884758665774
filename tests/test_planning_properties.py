"""What holds for every plan, on random models."""

from __future__ import annotations

import dataclasses
from typing import Any

import kvyard
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from kvyard import planning
from kvyard.planning import Plan, PlanningConfig, bytes_per_block, plan_kv_cache
from kvyard.planning.tensors import all_uniform_types

from tests.helpers import CORRECTED, VLLM
from tests.planning_models import (
    GIB,
    Layers,
    chunk,
    deepseek_v4,
    full,
    mla,
    rswa,
    sink,
    states,
    window,
)

# Pages of 16 to 256 KiB: each divides the larger ones.
SPECS: list[kvyard.KVCacheSpec] = [
    full(),
    full(4),
    full(8, 128, 16, head_size_v=64),
    full(8, 128, 32),
    window(128),
    window(1024),
    window(1024, 4),
    chunk(8192),
    rswa(64),
    rswa(256),
    sink(32),
    kvyard.TQFullAttentionSpec(16, 8, 128, "bfloat16", tq_slot_size=128),
    mla(512, 16),
    mla(256, 16),
    kvyard.HiddenStateCacheSpec(16, 1, 1024, "bfloat16"),
    states(16, "none", 1 << 21),
    states(64, "align", 1 << 21, speculative=1),
    kvyard.CrossAttentionSpec(16, 8, 128, "bfloat16"),
]


@st.composite
def models(draw: st.DrawFn) -> Layers:
    """Up to four kinds of layers, in any order."""
    if draw(st.integers(0, 9)) == 0:
        model = list(deepseek_v4().items())
        return dict(draw(st.permutations(model[:9] + model[41 : 41 + draw(st.integers(1, 9))])))
    kinds = draw(st.lists(st.sampled_from(SPECS), min_size=1, max_size=4, unique=True))
    specs = [spec for spec in kinds for _ in range(draw(st.integers(1, 7)))]
    specs = draw(st.permutations(specs))
    return {f"layer.{i}": spec for i, spec in enumerate(specs)}


LIMITS = st.fixed_dictionaries(
    {
        "max_model_len": st.sampled_from([1, 100, 4097, 65_536]),
        "max_num_batched_tokens": st.sampled_from([512, 8192]),
        "enable_cross_layers_blocks": st.booleans(),
        "enable_prefix_caching": st.booleans(),
        "disable_hybrid_kv_cache_manager": st.sampled_from([False] * 9 + [True]),
        "max_num_encoder_input_tokens": st.sampled_from([0, 1500]),
        "semantics": st.sampled_from([CORRECTED, CORRECTED, VLLM]),
    }
)
MEMORY = st.integers(16 * GIB, 200 * GIB)


def plan_or_reject(config: PlanningConfig, model: Layers, memory: int) -> Plan:
    """A plan; what the planner refuses is no example."""
    try:
        return plan_kv_cache(config, [model], [memory])
    except kvyard.ConfigError:
        assume(False)
        raise


def pages(group: kvyard.KVCacheGroupSpec) -> dict[str, int]:
    """Bytes per block of each layer of a group."""
    spec = group.kv_cache_spec
    own: Any = getattr(spec, "kv_cache_specs", {})
    return {layer: own.get(layer, spec).page_size_bytes for layer in group.layer_names}


@given(models(), LIMITS, MEMORY)
def test_layout(model: Layers, limits: dict[str, Any], memory: int) -> None:
    config = PlanningConfig(**limits)
    [worker] = plan_or_reject(config, model, memory).kv_cache_configs
    groups = worker.kv_cache_groups
    planned = [layer for group in groups for layer in group.layer_names]
    assert sorted(planned) == sorted(model)
    if all_uniform_types(groups) is None:
        assert len({group.kv_cache_spec.page_size_bytes for group in groups}) == 1
    size = bytes_per_block(config, groups)
    assert worker.num_blocks * size <= memory < (worker.num_blocks + 1) * size
    packed = {t.size for t in worker.kv_cache_tensors if t.block_stride}
    own = sum(t.size for t in worker.kv_cache_tensors if not t.block_stride)
    assert len(packed) <= 1
    assert sum(packed) + own == worker.num_blocks * size
    group_of = {layer: i for i, group in enumerate(groups) for layer in group.layer_names}
    placed = [layer for tensor in worker.kv_cache_tensors for layer in tensor.shared_by]
    assert sorted(placed) == sorted(model)
    for tensor in worker.kv_cache_tensors:
        assert len({group_of[layer] for layer in tensor.shared_by}) == len(tensor.shared_by)


@given(models(), LIMITS, MEMORY)
def test_packed_pages_do_not_overlap(model: Layers, limits: dict[str, Any], memory: int) -> None:
    config = PlanningConfig(**limits)
    [worker] = plan_or_reject(config, model, memory).kv_cache_configs
    size_of = {k: v for group in worker.kv_cache_groups for k, v in pages(group).items()}
    end = 0
    for tensor in worker.kv_cache_tensors:
        [size] = {size_of[layer] for layer in tensor.shared_by}
        if tensor.block_stride:
            assert tensor.offset == end
            end += size
            assert end <= tensor.block_stride
        else:
            assert tensor.size == size * worker.num_blocks


@given(models(), LIMITS, MEMORY)
def test_no_layer_loses_its_rule_or_its_bytes(
    model: Layers, limits: dict[str, Any], memory: int
) -> None:
    limits |= {"semantics": CORRECTED, "disable_hybrid_kv_cache_manager": False}
    config = PlanningConfig(**limits)
    plan = plan_or_reject(config, model, memory)
    for group, of_scheduler in zip(
        plan.kv_cache_configs[0].kv_cache_groups,
        plan.scheduler_kv_cache_config.kv_cache_groups,
        strict=True,
    ):
        spec = of_scheduler.kv_cache_spec
        for layer, page in pages(group).items():
            own = model[layer]
            assert spec.retention == own.retention
            if own.kind != "mamba":
                assert page * own.block_size >= own.page_size_bytes * spec.block_size or (
                    isinstance(own, kvyard.HiddenStateCacheSpec)
                )


@given(models(), LIMITS, MEMORY, st.data())
def test_the_order_of_layers_does_not_matter(
    model: Layers, limits: dict[str, Any], memory: int, data: st.DataObject
) -> None:
    limits |= {"semantics": CORRECTED}
    config = PlanningConfig(**limits)
    plan = plan_or_reject(config, model, memory)
    shuffled = dict(data.draw(st.permutations(list(model.items()))))
    other = plan_kv_cache(config, [shuffled], [memory])

    def shape(plan: Plan) -> list[str]:
        groups = plan.kv_cache_configs[0].kv_cache_groups
        described = []
        for group in groups:
            spec: Any = group.kv_cache_spec
            if isinstance(spec, kvyard.UniformTypeKVCacheSpecs):
                spec = sorted(map(repr, spec.kv_cache_specs.values()))
            described.append(f"{len(group.layer_names)} {spec}")
        return sorted(described)

    assert shape(plan) == shape(other)
    assert plan.scheduler_kv_cache_config.num_blocks == other.scheduler_kv_cache_config.num_blocks
    assert (plan.scheduler_block_size, plan.hash_block_size) == (
        other.scheduler_block_size,
        other.hash_block_size,
    )
    assert plan.max_concurrency == other.max_concurrency


@given(models(), LIMITS, MEMORY)
def test_equal_layers_are_interchangeable(
    model: Layers, limits: dict[str, Any], memory: int
) -> None:
    config = PlanningConfig(**limits)
    plan = plan_or_reject(config, model, memory)
    assert plan == plan_kv_cache(config, [model], [memory])
    renamed = {f"other.{layer}": spec for layer, spec in model.items()}
    other = plan_kv_cache(config, [renamed], [memory])
    assert [
        [f"other.{layer}" for layer in group.layer_names]
        for group in plan.scheduler_kv_cache_config.kv_cache_groups
    ] == [list(group.layer_names) for group in other.scheduler_kv_cache_config.kv_cache_groups]


@given(models(), LIMITS, MEMORY, st.integers(1, GIB))
def test_more_memory_holds_no_less(
    model: Layers, limits: dict[str, Any], memory: int, more: int
) -> None:
    config = PlanningConfig(**limits)
    plan = plan_or_reject(config, model, memory)
    larger = plan_kv_cache(config, [model], [memory + more])
    assert larger.num_tokens >= plan.num_tokens


@given(models(), LIMITS, st.integers(GIB, 8 * GIB))
def test_the_fitted_length_is_the_longest(
    model: Layers, limits: dict[str, Any], memory: int
) -> None:
    config = PlanningConfig(**limits, auto_fit_max_model_len=True)
    plan = plan_or_reject(config, model, memory)
    exact = dataclasses.replace(config, auto_fit_max_model_len=False)
    plan_kv_cache(exact.with_max_model_len(plan.max_model_len), [model], [memory])
    if plan.max_model_len < config.max_model_len:
        with pytest.raises(kvyard.InsufficientMemoryError) as error:
            plan_kv_cache(exact.with_max_model_len(plan.max_model_len + 1), [model], [memory])
        assert error.value.estimated_max_model_len == plan.max_model_len


@given(models(), LIMITS, MEMORY, st.data())
def test_pipeline_stages_agree(
    model: Layers, limits: dict[str, Any], memory: int, data: st.DataObject
) -> None:
    config = PlanningConfig(**limits)
    names = list(model)
    cut = data.draw(st.integers(0, len(names)))
    stages = [{k: model[k] for k in part} for part in (names[:cut], names[cut:])]
    try:
        plan = plan_kv_cache(config, stages, [memory, memory])
    except kvyard.ConfigError:
        assume(False)
        raise
    first, second = plan.kv_cache_configs
    assert first.num_blocks == second.num_blocks
    assert len(first.kv_cache_groups) == len(second.kv_cache_groups)
    for worker, stage in zip((first, second), stages, strict=True):
        planned = [layer for group in worker.kv_cache_groups for layer in group.layer_names]
        assert sorted(planned) == sorted(stage)
        size = bytes_per_block(config, worker.kv_cache_groups)
        assert worker.num_blocks * size <= memory


def test_the_strategy_reaches_every_rule() -> None:
    """The random models are no good if they are all refused, or all alike."""
    config = PlanningConfig(4097)
    pairs = [{"a": a, "b": b} for a in SPECS for b in SPECS]
    lengths = []
    for pair in pairs:
        try:
            lengths.append(len(planning.get_kv_cache_groups(config, pair)))
        except kvyard.PlanningError:
            lengths.append(0)
    assert min(lengths.count(n) for n in (0, 1, 2)) > 10
