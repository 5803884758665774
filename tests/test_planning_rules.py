"""What the planner merges, refuses and reserves, under both semantics."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import kvyard
import pytest
from kvyard import planning
from kvyard.planning import PlanningConfig, get_kv_cache_configs

from tests.helpers import CORRECTED, VLLM
from tests.planning_models import (
    GIB,
    Layers,
    chunk,
    cross,
    deepseek_v4,
    full,
    gemma,
    group_lengths,
    layers,
    mla,
    plan,
    rswa,
    scheduler_specs,
    sink,
    states,
    window,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

HYBRID_OFF: dict[str, Any] = {"disable_hybrid_kv_cache_manager": True}
PAGE = full().page_size_bytes


def specs_of_layers(model: Layers, **limits: Any) -> dict[str, kvyard.KVCacheSpec]:
    """The spec that a manager gets for each layer."""
    got = plan(model, 10, 8192, **limits)
    groups = got.scheduler_kv_cache_config.kv_cache_groups
    return {layer: group.kv_cache_spec for group in groups for layer in group.layer_names}


# --- errors, in the order in which they are looked for


def configs(*workers: Layers, memory: Sequence[int] | None = None, **limits: Any) -> None:
    config = PlanningConfig(8192, 2048, **limits)
    get_kv_cache_configs(config, workers, memory or [10 * GIB] * len(workers))


ENCODER_ONLY = kvyard.EncoderOnlyAttentionSpec(16, 8, 128, "bfloat16")


def test_a_conflict_between_workers_comes_first() -> None:
    with pytest.raises(kvyard.ConfigError, match="layer a: workers have different specs") as error:
        configs({"a": ENCODER_ONLY}, {"a": full()})
    assert isinstance(error.value, AssertionError)


def test_then_an_unknown_kind() -> None:
    model = layers((1, states(16, "none")), (1, full())) | {"encoder": ENCODER_ONLY}
    with pytest.raises(kvyard.ConfigError, match=r"layer encoder: EncoderOnly.* leave the layer"):
        configs(model, **HYBRID_OFF)


def test_then_layers_that_do_not_become_one_type() -> None:
    model = layers((1, states(16, "none")), (1, full()))
    message = "FullAttentionSpec, MambaSpec do not become one type; enable the hybrid manager"
    with pytest.raises(kvyard.ConfigError, match=message) as error:
        configs(model, memory=[0], **HYBRID_OFF)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("semantics", [VLLM, CORRECTED])
def test_then_two_windows_in_one_table(semantics: kvyard.Semantics) -> None:
    model = layers((1, full()), (1, window(1024)), (1, window(512)))
    with pytest.raises(kvyard.PlanningError, match=r"several, 512, 1024.*hybrid manager") as error:
        configs(model, memory=[0], semantics=semantics, **HYBRID_OFF)
    assert isinstance(error.value, ValueError)


def latent_window(
    tokens: int, block_size: int = 64, head_size: int = 512
) -> kvyard.SlidingWindowMLASpec:
    return kvyard.SlidingWindowMLASpec(block_size, 1, head_size, "uint8", sliding_window=tokens)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (layers((1, latent_window(8)), (1, latent_window(9))), "need MLA layers beside them"),
        (layers((1, latent_window(8)), (1, mla(512, 64)), (1, mla(512, 128))), "one block size"),
        (layers((1, latent_window(8, 512)), (1, mla(512, 64))), "reduce its block size of 512"),
        (
            layers(
                *((1, latent_window(8, 64, size)) for size in (100, 200, 300)),
                *((1, mla(size, 64)) for size in (100, 200)),
            ),
            "as many layers of each page size",
        ),
    ],
)
def test_then_the_structure_of_deepseek_v4(model: Layers, message: str) -> None:
    with pytest.raises(kvyard.PlanningError, match=message) as error:
        configs(model, memory=[0])
    assert isinstance(error.value, AssertionError)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            layers((4, mla()), (1, window(128, 8, 128, 64))),
            r"73,728 bytes \(MLAAttentionSpec, block size 64\) does not divide the largest page of"
            r" 262,144 bytes.*disable_hybrid_kv_cache_manager=True",
        ),
        (layers((4, full()), (4, window(128, 4, 150))), "38,400 .* indexes_kv_by_block_stride"),
        (layers((1, states(16, "none", None)), (1, full())), "65,536 .* largest page of 1,073,152"),
        (
            layers((1, states(16, "none", PAGE * 17)), (1, full(16, 128, 16 * 17))),
            f"layer layer.0: .*set page_size_padded={PAGE * 34}",
        ),
        (
            layers((1, full()), (1, window(128, 4, page_size_padded=PAGE // 2))),
            "does not become the largest page",
        ),
    ],
)
def test_then_pages_of_different_size(model: Layers, message: str) -> None:
    with pytest.raises(kvyard.PlanningError, match=message) as error:
        configs(model, memory=[0])
    assert isinstance(error.value, NotImplementedError)


def test_remedies_of_the_message_do_help() -> None:
    model = layers((4, mla()), (1, window(128, 8, 128, 64)))
    assert group_lengths(plan(model, 10, 8192, **HYBRID_OFF)) == [5]


def test_hidden_states_must_fit_a_page() -> None:
    hidden = kvyard.HiddenStateCacheSpec(16, 1, 11_520, "bfloat16")
    model = layers((1, full(1, 64)), (1, window(128, 1, 64))) | {"hidden": hidden}
    with pytest.raises(kvyard.PlanningError, match=r"takes 23,040 bytes.*at least 6 times"):
        configs(model)


def test_then_memory() -> None:
    model = deepseek_v4() | {"other": full()}
    with pytest.raises(kvyard.InsufficientMemoryError, match="0 bytes are left") as error:
        configs(model, memory=[0])
    assert isinstance(error.value, ValueError)
    assert error.value.available_bytes == 0


def test_then_layers_without_a_group() -> None:
    model = deepseek_v4() | {"other": full()}
    with pytest.raises(kvyard.PlanningError, match="layers other: FullAttentionSpec layers get no"):
        configs(model)


def test_workers_must_match_memory() -> None:
    for arguments in (([], []), ([layers((1, full()))], [1, 2])):
        with pytest.raises(kvyard.InvalidArgumentError, match="values for"):
            get_kv_cache_configs(PlanningConfig(8), *arguments)


def test_windows_refuse_decode_context_parallelism() -> None:
    with pytest.raises(kvyard.ConfigError, match="decode_context_parallel_size: sliding windows"):
        plan(gemma(6), 10, 8192, decode_context_parallel_size=2)
    with pytest.raises(kvyard.ConfigError, match="context parallelism: 6 groups"):
        plan(gemma(6), 10, 8192, prefill_context_parallel_size=2)


def test_hash_blocks_must_divide() -> None:
    with pytest.raises(kvyard.ConfigError, match=r"hash_block_size: 12 .* divisor of 16"):
        plan(gemma(6), 10, 8192, hash_block_size=12)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_model_len": 0}, "max_model_len: 0"),
        ({"block_size": True}, "block_size: True"),
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override: 0"),
        ({"max_num_encoder_input_tokens": -1}, "max_num_encoder_input_tokens: -1"),
        ({"mamba_cache_mode": "some"}, "mamba_cache_mode: 'some'"),
    ],
)
def test_limits_are_checked(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(kvyard.ConfigError, match=message):
        PlanningConfig(**({"max_model_len": 8192} | limits))


# --- memory, with and without the null block


def test_c22_the_null_block() -> None:
    model = layers((1, full(8, 128, 8)))
    memory = [13 * full(8, 128, 8).page_size_bytes]

    def planned(max_model_len: int, semantics: kvyard.Semantics) -> planning.Plan:
        config = PlanningConfig(max_model_len, semantics=semantics)
        return planning.plan_kv_cache(config, [model], memory)

    assert planned(104, VLLM).scheduler_kv_cache_config.num_blocks == 13
    with pytest.raises(kvyard.InsufficientMemoryError, match="set max_model_len to 96 or") as error:
        planned(104, CORRECTED)
    assert error.value.estimated_max_model_len == 96
    assert error.value.available_bytes == memory[0]
    assert error.value.needed_bytes == 14 * full(8, 128, 8).page_size_bytes
    with pytest.raises(kvyard.InsufficientMemoryError):
        planned(97, CORRECTED)
    assert planned(96, CORRECTED).scheduler_kv_cache_config.num_blocks == 13
    with pytest.raises(kvyard.InsufficientMemoryError, match="set max_model_len to 104 or"):
        planned(105, VLLM)


def test_what_the_check_admits_a_manager_admits() -> None:
    got = planning.plan_kv_cache(
        PlanningConfig(96), [layers((1, full(8, 128, 8)))], [13 * full(8, 128, 8).page_size_bytes]
    )
    manager = kvyard.KVCacheManager(
        got.scheduler_kv_cache_config, max_model_len=104, enable_caching=False
    )
    fits, too_long = (kvyard.Request(str(n), list(range(n))) for n in (96, 97))
    assert manager.allocate_slots(too_long, 97, full_sequence_must_fit=True) is None
    assert manager.allocate_slots(fits, 96, full_sequence_must_fit=True) is not None


@pytest.mark.parametrize(("semantics", "longest"), [(VLLM, 1600), (CORRECTED, 1584)])
def test_an_override_must_hold_a_request(semantics: kvyard.Semantics, longest: int) -> None:
    model = layers((32, full()))
    with pytest.raises(kvyard.InsufficientMemoryError) as error:
        plan(model, 10, 8192, num_gpu_blocks_override=100, semantics=semantics)
    assert error.value.estimated_max_model_len == longest
    got = plan(model, 0, 8192, num_gpu_blocks_override=1000, semantics=semantics)
    assert got.scheduler_kv_cache_config.num_blocks == 1000


@pytest.mark.parametrize(("semantics", "length"), [(VLLM, 4096), (CORRECTED, 4080)])
def test_fitting_the_length(semantics: kvyard.Semantics, length: int) -> None:
    model = layers((32, full()))
    limits: dict[str, Any] = {"auto_fit_max_model_len": True, "semantics": semantics}
    assert plan(model, 0.5, 8192, **limits).max_model_len == length
    assert plan(model, 10, 8192, **limits).max_model_len == 8192
    assert plan({}, 10, 8192, **limits).max_model_len == 8192
    overridden = plan(model, 10, 8192, num_gpu_blocks_override=100, **limits)
    assert overridden.max_model_len == (1600 if semantics == VLLM else 1584)
    with pytest.raises(kvyard.InsufficientMemoryError, match="do not hold one token"):
        plan(model, 0.001, 8192, **limits)


def test_the_tightest_worker_decides_the_length() -> None:
    config = PlanningConfig(8192, auto_fit_max_model_len=True, semantics=VLLM)
    got = planning.plan_kv_cache(config, [layers((32, full()))] * 2, [GIB, GIB // 2])
    assert got.max_model_len == 4096


def test_sinks_are_reserved_as_well() -> None:
    def longest(model: Layers) -> int:
        groups = planning.get_kv_cache_groups(PlanningConfig(8192), model)
        return planning.estimate_max_model_len(PlanningConfig(8192), groups, 13 * PAGE)

    assert longest(layers((1, full()))) == 12 * 16
    assert longest(layers((1, sink(32)))) == 10 * 16


# --- merging


def orders(*specs: kvyard.KVCacheSpec) -> list[Layers]:
    """Two layers of each spec, in all orders of the specs."""
    return [
        {f"{specs.index(spec)}.{i}": spec for spec in order for i in range(2)}
        for order in itertools.permutations(specs)
    ]


def test_plain_layers_swallow_or_take_the_gap_under_layer_order() -> None:
    plain_first, gap_first = orders(full(), rswa(64))
    swallowed = specs_of_layers(plain_first, semantics=VLLM)
    assert set(swallowed.values()) == {full()}
    spread = specs_of_layers(gap_first, semantics=VLLM)
    assert set(spread.values()) == {rswa(64)}


@pytest.mark.parametrize(
    "specs",
    [
        (full(), rswa(64)),
        (rswa(64), rswa(128)),
        (full(), sink(32)),
        (sink(16), sink(32)),
        (full(), rswa(64), sink(32)),
        (full(), rswa(64), window(64)),
    ],
    ids=str,
)
def test_each_layer_keeps_its_rule_in_any_order(specs: tuple[kvyard.KVCacheSpec, ...]) -> None:
    for model in orders(*specs):
        assert specs_of_layers(model) == model


@pytest.mark.parametrize("semantics", [VLLM, CORRECTED])
def test_encoder_outputs_share_no_table(semantics: kvyard.Semantics) -> None:
    for model in orders(full(), cross()):
        assert specs_of_layers(model, semantics=semantics, enable_prefix_caching=False) == model


def test_one_table_keeps_the_gap_as_well() -> None:
    for model in orders(full(), rswa(64)):
        assert set(specs_of_layers(model, **HYBRID_OFF).values()) == {full()}
    for model in orders(full(), sink(32)):
        with pytest.raises(kvyard.ConfigError, match="do not become one type"):
            specs_of_layers(model, **HYBRID_OFF)


NARROW_VALUES = full(8, 128, 16, head_size_v=64)
PACKED = kvyard.TQFullAttentionSpec(16, 8, 128, "bfloat16", tq_slot_size=136)
WIDE_ROWS, NARROW_ROWS = mla(576), mla(128)
HIDDEN_STATES = kvyard.HiddenStateCacheSpec(64, 1, 4096, "bfloat16")


@pytest.mark.parametrize(
    "specs",
    [
        (full(), NARROW_VALUES),
        (full(), PACKED),
        (WIDE_ROWS, NARROW_ROWS),
        (WIDE_ROWS, HIDDEN_STATES),
        (WIDE_ROWS, full(8, 128, 64)),
    ],
    ids=str,
)
def test_layers_of_other_shape_keep_their_pages_in_any_order(
    specs: tuple[kvyard.KVCacheSpec, ...],
) -> None:
    total = sum(2 * spec.page_size_bytes for spec in specs)
    for model in orders(*specs):
        [group] = planning.get_kv_cache_groups(PlanningConfig(8192), model)
        assert group.kv_cache_spec.page_size_bytes == total
        assert isinstance(group.kv_cache_spec, kvyard.UniformTypeKVCacheSpecs)
        assert dict(group.kv_cache_spec.kv_cache_specs) == model


def test_the_first_shape_decides_under_layer_order() -> None:
    sizes = []
    for model in orders(full(), NARROW_VALUES):
        config = PlanningConfig(8192, semantics=VLLM)
        [group] = planning.get_kv_cache_groups(config, model)
        sizes.append(group.kv_cache_spec.page_size_bytes)
    assert sizes == [65_536, 49_152]  # the second is too small for half of the layers


@pytest.mark.parametrize("semantics", [VLLM, CORRECTED])
def test_what_a_group_collects_from_its_layers(semantics: kvyard.Semantics) -> None:
    windowed = full(8, 128, 16, sliding_window=64)
    causal_not = full(8, 128, 16, non_causal=True)
    for model in orders(full(), windowed, causal_not):
        merged = full(8, 128, 16, sliding_window=64, non_causal=True)
        assert set(specs_of_layers(model, semantics=semantics).values()) == {merged}
    both = layers((1, windowed), (1, full(8, 128, 16, attention_chunk_size=64)))
    [group] = planning.get_kv_cache_groups(PlanningConfig(8192, semantics=semantics), both)
    assert isinstance(group.kv_cache_spec, kvyard.UniformTypeKVCacheSpecs)


def test_merged_latent_layers_keep_padding_and_drop_alignment() -> None:
    padded = mla(500, alignment=4096)
    assert padded.page_size_padded == 65_536
    [group] = planning.get_kv_cache_groups(PlanningConfig(8192), layers((2, padded)))
    spec = group.kv_cache_spec
    assert isinstance(spec, kvyard.MLAAttentionSpec)
    assert spec.alignment is None
    assert spec.page_size_bytes == 65_536


@pytest.mark.parametrize(("semantics", "page"), [(VLLM, 32_768), (CORRECTED, 33_792)])
def test_conversion_keeps_quantisation(semantics: kvyard.Semantics, page: int) -> None:
    arguments: dict[str, Any] = {
        "block_size": 16,
        "num_kv_heads": 8,
        "head_size": 128,
        "dtype": "uint8",
        "kv_quant_mode": kvyard.KVQuantMode.INT8_PER_TOKEN_HEAD,
    }
    local = kvyard.ChunkedLocalAttentionSpec(**arguments, attention_chunk_size=128)
    model = {"full": kvyard.FullAttentionSpec(**arguments), "local": local}
    converted = planning.unify_hybrid_kv_cache_specs(
        model, PlanningConfig(1, semantics=semantics).group_merge
    )
    assert converted["local"].page_size_bytes == page


def test_conversion_of_latent_windows() -> None:
    model = {"full": mla(512, 256), "window": latent_window(128)}
    with_table = planning.unify_hybrid_kv_cache_specs(model)
    assert with_table["window"].block_size == 256
    assert isinstance(with_table["window"], kvyard.MLAAttentionSpec)
    with pytest.raises(kvyard.ConfigError, match="do not become one type"):
        planning.unify_hybrid_kv_cache_specs(layers((1, latent_window(8)), (1, latent_window(9))))


def test_one_type_stays_as_it_is() -> None:
    for model in (layers((2, window(64))), layers((2, chunk(64))), layers((2, states(16, "none")))):
        assert planning.unify_hybrid_kv_cache_specs(model) == model


def test_scheduler_specs_are_known_to_a_manager() -> None:
    got = plan(layers((16, full(8)), (16, full(4))), 10, 8192)
    assert scheduler_specs(got) == [full(8)]
    unequal = [kvyard.KVCacheConfig(2, [], []), kvyard.KVCacheConfig(3, [], [])]
    with pytest.raises(kvyard.ConfigError, match="workers have different numbers"):
        planning.generate_scheduler_kv_cache_config(unequal)
    with pytest.raises(kvyard.ConfigError, match="no worker"):
        planning.generate_scheduler_kv_cache_config([])
