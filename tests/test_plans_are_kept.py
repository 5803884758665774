"""What a plan promises a manager keeps: the longest request gets its blocks, step by step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kvyard
import pytest
from kvyard.planning import Plan, PlanningConfig, plan_kv_cache
from kvyard.planning.models import ModelOptions, read_model

from tests.helpers import make_hasher
from tests.planning_models import Layers, chunk, full, jamba, layers, qwen3_next, rswa, sink, window

CONFIGS = Path(__file__).parent / "fixtures" / "configs"
STEP = 2048


def serve_longest(config: PlanningConfig, plan: Plan, **arguments: Any) -> int:
    """Compute one request of the planned length; the free blocks that are left."""
    manager = kvyard.KVCacheManager(
        plan.scheduler_kv_cache_config,
        max_model_len=plan.max_model_len,
        scheduler_block_size=plan.scheduler_block_size,
        hash_block_size=plan.hash_block_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_caching=config.enable_prefix_caching,
    )
    tokens = list(range(plan.max_model_len))
    hasher = make_hasher(plan.hash_block_size) if config.enable_prefix_caching else None
    request = kvyard.Request("longest", tokens, block_hasher=hasher)
    while request.num_computed_tokens < len(tokens):
        count = min(len(tokens) - request.num_computed_tokens, config.max_num_batched_tokens)
        if config.mamba_cache_mode == "align" and count == config.max_num_batched_tokens:
            # States are kept at ends of blocks, to which schedulers cut their steps.
            count -= (request.num_computed_tokens + count) % plan.scheduler_block_size
        first = request.num_computed_tokens == 0
        more = {**arguments, "full_sequence_must_fit": True} if first else {}
        assert manager.allocate_slots(request, count, **more) is not None
        request.num_computed_tokens += count
    return manager.block_pool.get_num_free_blocks()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_models(path: Path, caching: bool) -> None:
    options = ModelOptions(16_384, STEP, enable_prefix_caching=caching)
    model = read_model(json.loads(path.read_text()), options)
    config = PlanningConfig(
        min(model.max_model_len, 16_384),
        STEP,
        model.block_size,
        enable_prefix_caching=model.enable_prefix_caching,
        mamba_cache_mode=model.mamba_cache_mode,
        max_num_encoder_input_tokens=model.max_num_encoder_input_tokens,
        auto_fit_max_model_len=True,
    )
    plan = plan_kv_cache(config, [model.kv_cache_specs], [1 << 30])
    encoder = model.max_num_encoder_input_tokens
    serve_longest(config, plan, num_encoder_tokens=encoder)


MIXTURES: dict[str, tuple[Layers, str | None]] = {
    "full": (layers((4, full())), None),
    "window": (layers((2, full()), (4, window(128))), None),
    "chunk": (layers((2, full()), (4, chunk(512))), None),
    "gap": (layers((2, full()), (2, rswa(64))), None),
    "sink": (layers((2, sink(64))), None),
    "two page sizes": (layers((2, full()), (2, window(128, 4))), None),
    "states": (jamba("all"), "all"),
    "two states": (jamba("align"), "align"),
    "speculative states": (qwen3_next(), "align"),
}


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("num_blocks", [60, 131, 400])
def test_mixtures(name: str, num_blocks: int) -> None:
    model, mode = MIXTURES[name]
    config = PlanningConfig(
        16_384,
        STEP,
        block_size=272 if mode else 16,
        mamba_cache_mode=mode,
        num_gpu_blocks_override=num_blocks,
        auto_fit_max_model_len=True,
    )
    try:
        plan = plan_kv_cache(config, [model], [1])
    except kvyard.InsufficientMemoryError:
        pytest.skip("not one token fits")
    left = serve_longest(config, plan)
    if name == "full" and plan.max_model_len < 16_384:
        assert left == 0  # nothing was held back
