//! From a `KVCacheConfig`, ours or vLLM's, to the core's configuration. What is not known is
//! refused by name: a field that is overlooked would be a wrong cache.

use kvyard_core::{AttentionKind, KVCacheGroupSpec, KVCacheSpec};
use pyo3::prelude::*;
use pyo3::types::PyInt;

use crate::convert::count;
use crate::pool::config_error;

/// A positive int; anything else is a configuration error.
pub(crate) fn positive(field: &str, value: &Bound<'_, PyAny>) -> PyResult<u32> {
    match value.cast::<PyInt>().ok().and_then(|value| value.extract().ok()) {
        Some(number) => positive_number(field, number),
        None => Err(config_error(field, &format!("must be a positive int of 32 bits, not {value}"))),
    }
}

/// A number above 0; anything else is a configuration error.
pub(crate) fn positive_number(field: &str, value: i64) -> PyResult<u32> {
    u32::try_from(value).ok().filter(|number| *number > 0).ok_or_else(|| {
        config_error(field, &format!("must be a positive int of 32 bits, not {value}"))
    })
}

/// Fields that every attention spec has (vLLM 0.25.1's `v1/kv_cache_interface.py`).
const ATTENTION_FIELDS: [&str; 7] = [
    "block_size",
    "num_kv_heads",
    "head_size",
    "dtype",
    "kv_quant_mode",
    "page_size_padded",
    "indexes_kv_by_block_stride",
];
const FULL_FIELDS: [&str; 4] =
    ["head_size_v", "sliding_window", "attention_chunk_size", "non_causal"];
const MLA_FIELDS: [&str; 4] = ["cache_dtype_str", "alignment", "compress_ratio", "model_version"];

/// The spec classes that are known, by exact name: a subclass may follow other rules.
fn kind(class: &str, spec: &Bound<'_, PyAny>) -> PyResult<(AttentionKind, Vec<&'static str>)> {
    let mut fields = [&ATTENTION_FIELDS[..], &FULL_FIELDS[..]].concat();
    let kind = match class {
        "FullAttentionSpec" => AttentionKind::FullAttention,
        "TQFullAttentionSpec" => {
            fields.push("tq_slot_size");
            AttentionKind::FullAttention
        }
        "MLAAttentionSpec" | "HiddenStateCacheSpec" => {
            fields.extend(MLA_FIELDS);
            AttentionKind::MLAAttention
        }
        "RSWASpec" => {
            fields.push("rswa_window");
            let rswa_window = positive("rswa_window", &spec.getattr("rswa_window")?)?;
            AttentionKind::RSWA { rswa_window }
        }
        _ => {
            return Err(config_error(
                "kv_cache_spec",
                &format!("{class} is not supported; known are FullAttentionSpec, TQFullAttentionSpec, MLAAttentionSpec, HiddenStateCacheSpec and RSWASpec"),
            ));
        }
    };
    Ok((kind, fields))
}

/// The groups of a configuration.
pub(crate) fn groups(kv_cache_config: &Bound<'_, PyAny>) -> PyResult<Vec<KVCacheGroupSpec>> {
    kv_cache_config
        .getattr("kv_cache_groups")?
        .try_iter()?
        .map(|group| {
            let group = group?;
            let is_eagle_group = match group.getattr_opt("is_eagle_group")? {
                Some(flag) => flag.is_truthy()?,
                None => false,
            };
            Ok(KVCacheGroupSpec { spec: spec(&group.getattr("kv_cache_spec")?)?, is_eagle_group })
        })
        .collect()
}

fn spec(spec: &Bound<'_, PyAny>) -> PyResult<KVCacheSpec> {
    let class = spec.get_type().name()?.to_string();
    let (kind, known) = kind(&class, spec)?;
    if spec.hasattr("__dataclass_fields__")? {
        let fields = spec.py().import("dataclasses")?.call_method1("fields", (spec,))?;
        for field in fields.try_iter()? {
            let name: String = field?.getattr("name")?.extract()?;
            if !known.contains(&name.as_str()) {
                return Err(config_error(
                    "kv_cache_spec",
                    &format!("{class} has a field {name:?} that this version does not know"),
                ));
            }
        }
    }
    let block_size = count("block_size", spec.getattr("block_size")?.extract()?)?;
    Ok(KVCacheSpec { kind, block_size })
}
