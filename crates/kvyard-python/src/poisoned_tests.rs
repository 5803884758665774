//! What Python sees of a manager that a broken invariant has poisoned. No call of Python's breaks one, so
//! that these tests stand here, where the core's feature `testing` does it.

use std::ffi::CString;

use kvyard_core::BlockId;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::pool::BlockPool;

/// A manager with a running request, a popped one and a block that the pool handed out.
const BEFORE: &str = r#"
import json
import kvyard

spec = kvyard.FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="bfloat16")
config = kvyard.KVCacheConfig(12, [], [kvyard.KVCacheGroupSpec(["layer"], spec)])
manager = kvyard.KVCacheManager(config, max_model_len=64, enable_kv_cache_events=True)
pool = manager.block_pool
hasher = kvyard.BlockHasher("sha256", bytes(32), 4)
running, popped = (
    kvyard.Request(name, list(range(8)), block_hasher=hasher) for name in ("running", "popped")
)
for request in (running, popped):
    assert manager.allocate_slots(request, 8) is not None
lease = manager.pop_blocks_for_free(popped)
handed_out = pool.get_new_blocks(1)
manager.validate()
"#;

/// Whoever finds the fault gets the report; everybody after that is told, and nothing else is decided.
const AFTER: &str = r#"
def refused(call, error):
    try:
        call()
    except error as raised:
        assert type(raised) is error, raised
        return raised
    raise AssertionError(f"no error: {call.__code__.co_names}")

found = refused(lambda: manager.audit(1_000_000), kvyard.InvariantError)
assert "I2: block 9" in str(found), found
assert json.loads(found.report)["violation"] == str(found)

calls = [
    lambda: manager.usage,
    lambda: manager.get_computed_blocks(running),
    lambda: manager.allocate_slots(running, 1),
    lambda: manager.free(running),
    lambda: manager.free(running, 4),
    lambda: manager.pop_blocks_for_free(running),
    lambda: manager.free_popped(lease),
    lambda: manager.cache_blocks(running, 4),
    lambda: manager.evict_blocks([1]),
    lambda: manager.evict_blocks([1] * 2000),
    lambda: manager.remove_skipped_blocks("running", 4),
    lambda: manager.reset_prefix_cache(),
    lambda: manager.take_events(),
    lambda: manager.get_block_ids("running"),
    lambda: manager.new_step_starts(),
    lambda: manager.state_digest(),
    lambda: pool.get_new_blocks(1),
    lambda: pool.touch(handed_out),
    lambda: pool.free_blocks(handed_out),
    lambda: pool.get_num_free_blocks(),
]
for call in calls:
    raised = refused(call, kvyard.PoisonedError)
    assert "unusable" in str(raised), raised
assert not lease.released
refused(manager.validate, kvyard.InvariantError)
operations = json.loads(manager.report())["operations"]
assert "get_new_blocks(1)" in [operation["op"] for operation in operations], operations
"#;

#[test]
fn every_later_call_raises_poisoned_error() {
    Python::initialize();
    Python::attach(|py| {
        if let Err(error) = poison(py) {
            error.print(py);
            panic!("see the traceback");
        }
    });
}

fn poison(py: Python<'_>) -> PyResult<()> {
    let sys = py.import("sys")?;
    let sources = concat!(env!("CARGO_MANIFEST_DIR"), "/../../python");
    sys.getattr("path")?.call_method1("insert", (0, sources))?;
    // The package of the sources, over this very build.
    let built = pyo3::wrap_pymodule!(crate::_kvyard)(py);
    sys.getattr("modules")?.set_item("kvyard._kvyard", built)?;
    let names = PyDict::new(py);
    let run = |code: &str| py.run(&CString::new(code)?, Some(&names), None);
    run(BEFORE)?;
    let pool = names.as_any().get_item("pool")?.cast_into::<BlockPool>()?;
    let broken = pool.get().shared.run(py, |core| core.manager().break_invariant(BlockId(9)));
    assert_eq!(broken, Ok(()));
    run(AFTER)
}
