"""The planner on worked examples: groups, tensors, blocks, concurrency."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import kvyard
import pytest
from kvyard import planning
from kvyard.planning import PlanningConfig, plan_kv_cache
from kvyard.planning.deepseek_v4 import approximate_gcd

from tests.helpers import CORRECTED, VLLM
from tests.planning_models import (
    GIB,
    Layers,
    cross,
    deepseek_v4,
    deepseek_v32,
    full,
    gemma,
    gpt_oss,
    group_lengths,
    jamba,
    layers,
    llama_4,
    mla,
    plan,
    qwen3_next,
    states,
    window,
)


@dataclass(frozen=True)
class Example:
    """A model and its limits, and what comes of them; concurrency to three decimals."""

    model: Layers
    gib: int
    max_model_len: int
    max_num_batched_tokens: int
    groups: list[int]
    tensors: int
    num_blocks: int
    concurrency: float
    limits: dict[str, Any] = field(default_factory=dict)

    def plan(self, **more: Any) -> planning.Plan:
        return plan(
            self.model,
            self.gib,
            self.max_model_len,
            self.max_num_batched_tokens,
            **self.limits,
            **more,
        )


HYBRID_OFF = {"disable_hybrid_kv_cache_manager": True}
STATES = {"block_size": 272}
NO_CACHING = {"enable_prefix_caching": False}
PADDED = window(1024, 4, 150, indexes_kv_by_block_stride=True)

EXAMPLES = {
    "llama": Example(layers((32, full())), 10, 8192, 0, [32], 32, 5120, 10.0),
    "one type, two shapes": Example(
        layers((16, full(8)), (16, full(4))), 10, 8192, 0, [32], 32, 6826, 13.332
    ),
    "gemma 62": Example(gemma(62), 20, 8192, 2048, [9, 9, 9, 9, 8, 8, 10], 10, 16_384, 9.811),
    "gemma 30": Example(gemma(30), 20, 8192, 2048, [5] * 6, 5, 32_768, 22.186),
    "gemma 30, one table": Example(gemma(30), 20, 8192, 2048, [30], 30, 5461, 10.666, HYBRID_OFF),
    "gpt-oss": Example(gpt_oss(), 20, 131_072, 8192, [12, 12], 12, 54_613, 6.268),
    "gpt-oss, draft layer": Example(
        gpt_oss() | {"draft": full(8, 64)}, 20, 131_072, 8192, [12, 13], 13, 50_412, 5.786
    ),
    "llama 4": Example(llama_4(), 60, 131_072, 8192, [12] * 4, 12, 81_920, 7.273),
    "llama 4, one table": Example(llama_4(), 60, 131_072, 8192, [48], 48, 20_480, 2.5, HYBRID_OFF),
    "20 and 30": Example(
        layers((20, full()), (30, window(1024))), 20, 8192, 2048, [20, 15, 15], 20, 16_384, 18.245
    ),
    "20 and 29": Example(
        layers((20, full()), (29, window(1024))), 20, 8192, 2048, [20, 29], 29, 11_299, 16.027
    ),
    "jamba, align": Example(jamba("align"), 20, 65_536, 8192, [4] * 8, 4, 4818, 18.894, STATES),
    "jamba, all": Example(jamba("all"), 20, 65_536, 8192, [4] * 8, 4, 4818, 2.499, STATES),
    "jamba, none": Example(
        jamba("none"), 20, 65_536, 8192, [4] * 8, 4, 4818, 19.427, STATES | NO_CACHING
    ),
    "qwen3-next": Example(qwen3_next(), 20, 65_536, 8192, [12] * 4, 12, 1606, 6.424, STATES),
    "qwen3-next, draft layer": Example(
        qwen3_next() | {"draft": full(8, 128, 272)},
        20,
        65_536,
        8192,
        [12, 12, 12, 13],
        13,
        1482,
        5.928,
        STATES,
    ),
    "states alone": Example(
        layers((24, states(65_536, "none", None))), 20, 65_536, 8192, [24], 24, 833, 833
    ),
    "wide draft layer": Example(
        layers((32, full(8)), (1, full(16))), 10, 8192, 0, [33], 33, 4818, 9.410
    ),
    "latent, plain draft layer": Example(
        layers((61, mla()), (1, full(8, 128, 64))), 40, 163_840, 8192, [62], 62, 9023, 3.525
    ),
    "gpt-oss, draft layer with another window": Example(
        gpt_oss() | {"draft": window(4096, 8, 64)}, 20, 131_072, 8192, [1] * 25, 1, 655_360, 6.222
    ),
    "KV sharing": Example(layers((20, full())), 10, 8192, 0, [20], 20, 8192, 16.0),
    "latent": Example(layers((62, mla())), 40, 163_840, 8192, [62], 62, 9395, 3.670),
    "latent, indexer": Example(deepseek_v32(), 40, 163_840, 8192, [122], 122, 13_961, 5.454),
    "two page sizes": Example(
        layers((4, full(8)), (4, window(1024, 4))), 10, 8192, 2048, [4, 4], 4, 40_960, 67.258
    ),
    "a padded page": Example(
        layers((4, full(8)), (4, PADDED)), 10, 8192, 2048, [4, 4], 4, 40_960, 58.099
    ),
    "two windows": Example(
        layers((4, window(1024)), (4, window(512))), 10, 8192, 2048, [4, 4], 4, 40_960, 115.706
    ),
    "whisper": Example(
        layers((4, full(20, 64)), (4, cross(20, 64))),
        10,
        448,
        448,
        [4, 4],
        4,
        32_768,
        268.590,
        {"max_num_encoder_input_tokens": 1500} | NO_CACHING,
    ),
    "deepseek v4": Example(
        deepseek_v4(), 40, 131_072, 8192, [41, 22, 21], 42, 50_043, 65.075, {"use_eagle": True}
    ),
    "gemma 30, packed": Example(
        gemma(30),
        20,
        8192,
        2048,
        [5] * 6,
        5,
        32_768,
        22.186,
        {"enable_cross_layers_blocks": True},
    ),
    "nothing": Example({}, 20, 8192, 2048, [], 0, 1, math.inf),
}


@pytest.mark.parametrize("semantics", [VLLM, CORRECTED], ids=["vllm", "corrected"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_worked_examples(name: str, semantics: kvyard.Semantics) -> None:
    example = EXAMPLES[name]
    got = example.plan(semantics=semantics)
    [worker] = got.kv_cache_configs
    assert group_lengths(got) == example.groups
    assert len(worker.kv_cache_tensors) == example.tensors
    assert worker.num_blocks == got.scheduler_kv_cache_config.num_blocks == example.num_blocks
    assert got.max_concurrency == pytest.approx(example.concurrency, abs=0.0006)
    if math.isfinite(example.concurrency):
        assert got.num_tokens == int(got.max_concurrency * example.max_model_len)


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("llama", [512]),
        ("gemma 62", [193] * 6 + [512]),
        ("gpt-oss", [521, 8192]),
        ("llama 4", [1024] * 3 + [8192]),
        ("jamba, align", [2] * 7 + [241]),
        ("jamba, all", [241] * 8),
        ("qwen3-next", [3] * 3 + [241]),
    ],
)
def test_blocks_a_request(name: str, blocks: list[int]) -> None:
    example = EXAMPLES[name]
    config = PlanningConfig(example.max_model_len, example.max_num_batched_tokens, **example.limits)
    groups = planning.get_kv_cache_groups(config, example.model)
    assert [group.kv_cache_spec.max_blocks_per_request(config) for group in groups] == blocks


def tensors_of(name: str) -> list[kvyard.KVCacheTensor]:
    """The tensors of an example."""
    return list(EXAMPLES[name].plan().kv_cache_configs[0].kv_cache_tensors)


def test_one_tensor_a_layer_of_one_group() -> None:
    tensors = tensors_of("llama")
    assert {tensor.size for tensor in tensors} == {335_544_320}
    assert [list(tensor.shared_by) for tensor in tensors] == [[f"layer.{i}"] for i in range(32)]


def test_tensors_of_two_shapes() -> None:
    sizes = [tensor.size for tensor in tensors_of("one type, two shapes")]
    assert sizes == [447_348_736] * 16 + [223_674_368] * 16
    sizes = [tensor.size for tensor in tensors_of("wide draft layer")]
    assert sizes == [315_752_448] * 32 + [631_504_896]


def test_tensors_are_shared_by_one_layer_of_each_group() -> None:
    tensors = tensors_of("gemma 62")
    # Strides: the first windows of all six groups, and the first full layer.
    assert tensors[0].shared_by == [
        *("layer.0", "layer.1", "layer.2", "layer.3", "layer.4", "layer.6"),
        "layer.5",
    ]
    assert tensors[-1].shared_by == ["layer.59"]
    assert len(tensors_of("gpt-oss, draft layer with another window")[0].shared_by) == 25
    assert tensors_of("gpt-oss, draft layer")[-1].shared_by == ["draft"]


def test_packed_tensors_alias_one_backing() -> None:
    tensors = tensors_of("gemma 30, packed")
    assert {tensor.size for tensor in tensors} == {20 * GIB}
    assert {tensor.block_stride for tensor in tensors} == {655_360}
    assert [tensor.offset for tensor in tensors] == [131_072 * i for i in range(5)]
    assert all(len(tensor.shared_by) == 6 for tensor in tensors)


def test_deepseek_v4() -> None:
    got = plan(deepseek_v4(), 40, 131_072, 8192, use_eagle=True)
    [worker] = got.kv_cache_configs
    groups = worker.kv_cache_groups
    assert [group.is_eagle_group for group in groups] == [False, True, False]
    assert groups[1].layer_names[-1] == "window.42"
    stride = 22 * 37_440 + 20 * 1_728
    assert {tensor.block_stride for tensor in worker.kv_cache_tensors} == {stride}
    assert {tensor.size for tensor in worker.kv_cache_tensors} == {stride * 50_043}
    assert worker.kv_cache_tensors[-1].offset == stride - 1_728
    config = PlanningConfig(131_072, 8192)
    concurrency = planning.get_max_concurrency_for_kv_cache_config
    assert concurrency(config, got.scheduler_kv_cache_config) == pytest.approx(64.655, abs=0.0005)
    without = plan(deepseek_v4(), 40, 131_072, 8192)
    flagged = [group.is_eagle_group for group in without.kv_cache_configs[0].kv_cache_groups]
    assert not any(flagged)


def test_deepseek_v4_counts_all_slots_in_every_group() -> None:
    config = PlanningConfig(131_072, 8192)
    groups = planning.get_kv_cache_groups(config, deepseek_v4())
    blocks = [group.kv_cache_spec.max_blocks_per_request(config) for group in groups]
    assert blocks == [512, 131, 131]
    slots = 22 * (37_440 + 1_728)
    assert planning.max_memory_usage_bytes(config, groups) == slots * (512 + 131 + 131)


def test_deepseek_v4_pads_windows_to_a_latent_page() -> None:
    model = deepseek_v4()
    small = kvyard.SlidingWindowMLASpec(
        2,
        1,
        512,
        "uint8",
        sliding_window=8,
        cache_dtype_str="fp8_ds_mla",
        model_version="deepseek_v4",
    )
    model |= {f"small.{i}": small for i in range(4)}
    groups = planning.get_kv_cache_groups(PlanningConfig(8192), model)
    assert groups[-1].kv_cache_spec.page_size_bytes == 4 * 1_728
    assert small.page_size_padded is None  # the given spec stays as it was


@pytest.mark.parametrize(
    ("values", "lower_bound", "divisor"),
    [
        ([11, 21], 11, 11),
        ([10, 21], 10, 11),
        ([21, 43], 21, 22),
        ([12, 13], 12, 13),
        ([7, 7, 7], 7, 7),
        ([3, 4], 9, 9),
        ([12, 18], 1, 6),
    ],
)
def test_approximate_gcd(values: list[int], lower_bound: int, divisor: int) -> None:
    assert approximate_gcd(values, lower_bound) == divisor


@pytest.mark.parametrize("values", [[], [0, 3], [4, -1]])
def test_approximate_gcd_of_nothing(values: list[int]) -> None:
    with pytest.raises(kvyard.InvalidArgumentError, match="positive"):
        approximate_gcd(values)


def test_hidden_states_fit_the_common_page() -> None:
    hidden = kvyard.HiddenStateCacheSpec(16, 1, 11_520, "bfloat16")  # 23,040 bytes a token
    got = plan(gpt_oss() | {"hidden": hidden}, 20, 8192)
    [worker] = got.kv_cache_configs
    group = worker.kv_cache_groups[-1]
    assert (group.layer_names, group.kv_cache_spec.block_size) == (["hidden"], 1)
    assert group.kv_cache_spec.page_size_bytes == 32_768
    assert (got.scheduler_block_size, got.hash_block_size) == (16, 1)


def test_hidden_states_join_full_attention() -> None:
    hidden = kvyard.HiddenStateCacheSpec(16, 1, 4096, "bfloat16")
    got = plan(layers((32, full())) | {"hidden": hidden}, 10, 8192)
    assert group_lengths(got) == [33]


def pipeline(gib: tuple[int, int]) -> planning.Plan:
    """Gemma's 30 layers on two workers."""
    model = list(gemma(30).items())
    stages = [dict(model[:15]), dict(model[15:])]
    return plan_kv_cache(PlanningConfig(8192, 2048), stages, [size * GIB for size in gib])


def test_pipeline_stages_share_the_smallest_number_of_blocks() -> None:
    got = pipeline((10, 8))
    assert [group_lengths(got, i) for i in (0, 1)] == [[3, 3, 3, 2, 2, 2], [2, 2, 2, 3, 3, 3]]
    assert {config.num_blocks for config in got.kv_cache_configs} == {21_845}
    assert pipeline((10, 10)).kv_cache_configs[0].num_blocks == 27_306
    for config in got.kv_cache_configs:
        assert [tensor.size for tensor in config.kv_cache_tensors] == [2_863_267_840] * 3
    assert got.max_concurrency == pytest.approx(14.790, abs=0.0005)


def test_a_stage_without_layers_sets_no_limit() -> None:
    model = gemma(30)
    got = plan_kv_cache(PlanningConfig(8192, 2048), [model, {}], [20 * GIB, 1])
    assert [config.num_blocks for config in got.kv_cache_configs] == [32_768] * 2
    assert not got.kv_cache_configs[1].kv_cache_tensors


def test_override() -> None:
    model = layers((32, full()))
    got = plan(model, 10, 8192, num_gpu_blocks_override=1000)
    [worker] = got.kv_cache_configs
    assert worker.num_blocks == 1000
    assert worker.kv_cache_tensors[0].size == 65_536 * 1000


def test_sharing_layers_are_listed_after_planning() -> None:
    got = plan(layers((20, full())), 10, 8192)
    groups = got.kv_cache_configs[0].kv_cache_groups
    shared = {f"layer.{i}": f"layer.{i - 10}" for i in range(20, 30)}
    [group] = planning.add_kv_sharing_layers_to_kv_cache_groups(shared, groups)
    assert list(group.layer_names) == [f"layer.{i}" for i in range(30)]
    assert len(groups[0].layer_names) == 20
    chained = {"layer.20": "layer.19", "layer.21": "layer.20"}
    [group] = planning.add_kv_sharing_layers_to_kv_cache_groups(chained, groups)
    assert list(group.layer_names)[-2:] == ["layer.20", "layer.21"]
    with pytest.raises(kvyard.ConfigError, match="it reuses the cache of nobody"):
        planning.add_kv_sharing_layers_to_kv_cache_groups({"layer.99": "nobody"}, groups)


@pytest.mark.parametrize(
    ("name", "units"),
    [
        ("llama", (16, 16)),
        ("gemma 62", (16, 16)),
        ("two page sizes", (32, 16)),
        ("jamba, align", (272, 272)),
        ("jamba, none", (1_114_112, 1_114_112)),
        ("latent", (64, 64)),
        ("states alone", (65_536, 65_536)),
        ("nothing", (16, 16)),
    ],
)
def test_units_of_scheduling_and_hashing(name: str, units: tuple[int, int]) -> None:
    got = EXAMPLES[name].plan()
    assert (got.scheduler_block_size, got.hash_block_size) == units


def test_units_follow_options() -> None:
    model = layers((4, full(8)), (4, window(1024, 4)))
    off = plan(model, 10, 8192, 2048, enable_prefix_caching=False)
    assert (off.scheduler_block_size, off.hash_block_size) == (32, 32)
    for_connector = plan(model, 10, 8192, 2048, enable_prefix_caching=False, has_kv_connector=True)
    assert for_connector.hash_block_size == 16
    assert plan(model, 10, 8192, 2048, hash_block_size=8).hash_block_size == 8
    ranks = plan(layers((4, full())), 10, 8192, decode_context_parallel_size=2)
    assert (ranks.scheduler_block_size, ranks.hash_block_size) == (32, 32)


def test_units_of_blocks_that_do_not_divide_each_other() -> None:
    groups = [kvyard.KVCacheGroupSpec([str(n)], full(8, 128, n)) for n in (16, 24)]
    units = planning.resolve_kv_cache_block_sizes(
        kvyard.KVCacheConfig(10, [], groups), PlanningConfig(8192)
    )
    assert units == (48, 8)


def test_states_in_blocks_of_their_own_are_hashed_whole() -> None:
    model = layers((3, states(544, "all")), (1, full(8, 128, 272)))
    got = plan(model, 20, 8192, block_size=272)
    assert (got.scheduler_block_size, got.hash_block_size) == (544, 544)


def test_one_group_of_enlarged_blocks_sets_the_units() -> None:
    # vLLM takes block_size here, with which its manager cannot be built.
    got = plan(layers((1, full(8, 128, 16)), (1, full(8, 128, 32))), 10, 8192)
    assert group_lengths(got) == [2]
    assert (got.scheduler_block_size, got.hash_block_size) == (32, 32)


def test_a_managers_configuration() -> None:
    got = plan(layers((16, full(8)), (16, full(4))), 10, 8192)
    manager = kvyard.KVCacheManager(got.scheduler_kv_cache_config, max_model_len=8192)
    assert manager.block_pool.num_gpu_blocks == 6826
