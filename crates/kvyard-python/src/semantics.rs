//! `kvyard.Semantics`.

use kvyard_core::semantics::{
    AlignPrediction, CommonPrefix, DeferredFreeOrder, GroupMerge, HashDomains, MediaCursor,
    RemovalEvent, Semantics as Core, SparseStoreEvent, StatsOn,
};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::invalid_argument;

/// Whose decisions: vLLM 0.25.1's, or the same with its faults mended.
#[pyclass(frozen, eq, hash, from_py_object, module = "kvyard._kvyard")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Semantics(pub(crate) Core);

/// The names of an enum field's two values, and the way back.
macro_rules! two_values {
    ($($kind:ident { $first:ident = $first_name:literal, $second:ident = $second_name:literal })*) => {$(
        impl TwoValues for $kind {
            fn name(self) -> &'static str {
                match self {
                    Self::$first => $first_name,
                    Self::$second => $second_name,
                }
            }
            fn parse(field: &'static str, name: &str) -> PyResult<Self> {
                match name {
                    $first_name => Ok(Self::$first),
                    $second_name => Ok(Self::$second),
                    _ => Err(invalid_argument(
                        field,
                        format!("must be {:?} or {:?}, not {name:?}", $first_name, $second_name),
                    )),
                }
            }
        }
    )*};
}

trait TwoValues: Sized {
    fn name(self) -> &'static str;
    fn parse(field: &'static str, name: &str) -> PyResult<Self>;
}

two_values! {
    HashDomains { Bare = "bare", Tagged = "tagged" }
    MediaCursor { LastItem = "last_item", FirstOverlap = "first_overlap" }
    CommonPrefix { References = "references", RowMembership = "row_membership" }
    RemovalEvent { EveryCopy = "every_copy", LastCopy = "last_copy" }
    SparseStoreEvent { OnePerCall = "one_per_call", OnePerRun = "one_per_run" }
    DeferredFreeOrder { AcrossGroups = "across_groups", GroupByGroup = "group_by_group" }
    GroupMerge { LayerOrder = "layer_order", OrderIndependent = "order_independent" }
    AlignPrediction { Estimate = "estimate", TrueNeed = "true_need" }
    StatsOn { Lookup = "lookup", Admission = "admission" }
}

#[pymethods]
impl Semantics {
    /// Decision for decision what vLLM 0.25.1 does.
    #[staticmethod]
    fn vllm_0_25_1() -> Self {
        Self(Core::vllm_0_25_1())
    }

    /// The same with its faults mended; the default everywhere.
    #[staticmethod]
    fn corrected() -> Self {
        Self(Core::corrected())
    }

    /// A copy with some fields changed.
    #[pyo3(signature = (**fields))]
    fn replace(&self, fields: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let mut core = self.0;
        for (name, value) in fields.into_iter().flatten() {
            let name: String = name.extract()?;
            set_field(&mut core, &name, &value)?;
        }
        Ok(Self(core))
    }

    /// How extra keys enter a block's hash: "bare" or "tagged".
    #[getter]
    fn hash_domains(&self) -> &'static str {
        self.0.hash_domains.name()
    }

    /// From which media item incremental hashing goes on: "last_item" or "first_overlap".
    #[getter]
    fn media_cursor(&self) -> &'static str {
        self.0.media_cursor.name()
    }

    /// Whether a cached block past the cap proves an EAGLE group's look-ahead block.
    #[getter]
    fn eagle_credit(&self) -> bool {
        self.0.eagle_credit
    }

    /// Whether sparse retention keeps the boundaries that are left after the EAGLE drop.
    #[getter]
    fn eagle_retention(&self) -> bool {
        self.0.eagle_retention
    }

    /// What counts as common to all requests: "references" or "row_membership".
    #[getter]
    fn common_prefix(&self) -> &'static str {
        self.0.common_prefix.name()
    }

    /// When a removal is announced: "every_copy" or "last_copy".
    #[getter]
    fn removal_event(&self) -> &'static str {
        self.0.removal_event.name()
    }

    /// How a stored span with gaps is announced: "one_per_call" or "one_per_run".
    #[getter]
    fn sparse_store_event(&self) -> &'static str {
        self.0.sparse_store_event.name()
    }

    /// In which order popped blocks go back: "across_groups" or "group_by_group".
    #[getter]
    fn deferred_free_order(&self) -> &'static str {
        self.0.deferred_free_order.name()
    }

    /// When a lookup enters the statistics: "lookup" or "admission".
    #[getter]
    fn stats_on(&self) -> &'static str {
        self.0.stats_on.name()
    }

    /// Whether the full-sequence gate counts look-ahead slots.
    #[getter]
    fn gate_counts_lookahead(&self) -> bool {
        self.0.gate_counts_lookahead
    }

    /// Whether the planner's memory check reserves the null block.
    #[getter]
    fn planner_reserves_null(&self) -> bool {
        self.0.planner_reserves_null
    }

    /// How the planner merges specifications: "layer_order" or "order_independent".
    #[getter]
    fn group_merge(&self) -> &'static str {
        self.0.group_merge.name()
    }

    /// What admission predicts for Mamba groups in align mode: "estimate" or "true_need".
    #[getter]
    fn align_prediction(&self) -> &'static str {
        self.0.align_prediction.name()
    }

    /// Whether `get_block_ids_for_computed_tokens` counts tokens across all context-parallel ranks.
    #[getter]
    fn computed_ids_under_cp(&self) -> bool {
        self.0.computed_ids_under_cp
    }

    fn __repr__(&self) -> String {
        if self.0 == Core::vllm_0_25_1() {
            return "Semantics.vllm_0_25_1()".to_owned();
        }
        if self.0 == Core::corrected() {
            return "Semantics.corrected()".to_owned();
        }
        let text = |name: &str, value: &str| format!("{name}={value:?}");
        let flag =
            |name: &str, value: bool| format!("{name}={}", if value { "True" } else { "False" });
        let fields = [
            text("hash_domains", self.hash_domains()),
            text("media_cursor", self.media_cursor()),
            flag("eagle_credit", self.eagle_credit()),
            flag("eagle_retention", self.eagle_retention()),
            text("common_prefix", self.common_prefix()),
            text("removal_event", self.removal_event()),
            text("sparse_store_event", self.sparse_store_event()),
            text("deferred_free_order", self.deferred_free_order()),
            text("stats_on", self.stats_on()),
            flag("gate_counts_lookahead", self.gate_counts_lookahead()),
            flag("planner_reserves_null", self.planner_reserves_null()),
            text("group_merge", self.group_merge()),
            text("align_prediction", self.align_prediction()),
            flag("computed_ids_under_cp", self.computed_ids_under_cp()),
        ];
        format!("Semantics({})", fields.join(", ")).replace('"', "'")
    }
}

fn set_field(core: &mut Core, name: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
    fn parse<T: TwoValues>(field: &'static str, value: &Bound<'_, PyAny>) -> PyResult<T> {
        let name: String = value
            .extract()
            .map_err(|_| invalid_argument(field, "must be the name of one of its two values"))?;
        T::parse(field, &name)
    }
    fn flag(field: &'static str, value: &Bound<'_, PyAny>) -> PyResult<bool> {
        value.extract().map_err(|_| invalid_argument(field, "must be True or False"))
    }
    match name {
        "hash_domains" => core.hash_domains = parse("hash_domains", value)?,
        "media_cursor" => core.media_cursor = parse("media_cursor", value)?,
        "eagle_credit" => core.eagle_credit = flag("eagle_credit", value)?,
        "eagle_retention" => core.eagle_retention = flag("eagle_retention", value)?,
        "common_prefix" => core.common_prefix = parse("common_prefix", value)?,
        "removal_event" => core.removal_event = parse("removal_event", value)?,
        "sparse_store_event" => core.sparse_store_event = parse("sparse_store_event", value)?,
        "deferred_free_order" => core.deferred_free_order = parse("deferred_free_order", value)?,
        "stats_on" => core.stats_on = parse("stats_on", value)?,
        "gate_counts_lookahead" => {
            core.gate_counts_lookahead = flag("gate_counts_lookahead", value)?;
        }
        "planner_reserves_null" => {
            core.planner_reserves_null = flag("planner_reserves_null", value)?;
        }
        "group_merge" => core.group_merge = parse("group_merge", value)?,
        "align_prediction" => core.align_prediction = parse("align_prediction", value)?,
        "computed_ids_under_cp" => {
            core.computed_ids_under_cp = flag("computed_ids_under_cp", value)?;
        }
        _ => {
            return Err(invalid_argument("semantics", format!("has no field {name:?}")));
        }
    }
    Ok(())
}
