//! From a `KVCacheConfig`, ours or vLLM's, to the core's configuration. What is not known is
//! refused by name: a field that is overlooked would be a wrong cache.

use kvyard_core::spec::MambaCacheMode;
use kvyard_core::{AttentionKind, KVCacheGroupSpec, KVCacheSpec};
use pyo3::prelude::*;
use pyo3::types::PyInt;

use crate::convert::count;
use crate::error::config_error;

/// A positive int; anything else is a configuration error.
pub(crate) fn positive(field: &str, value: &Bound<'_, PyAny>) -> PyResult<u32> {
    match value.cast::<PyInt>().ok().and_then(|value| value.extract().ok()) {
        Some(number) => positive_number(field, number),
        None => {
            Err(config_error(field, &format!("must be a positive int of 32 bits, not {value}")))
        }
    }
}

/// A number above 0; anything else is a configuration error.
pub(crate) fn positive_number(field: &str, value: i64) -> PyResult<u32> {
    u32::try_from(value).ok().filter(|number| *number > 0).ok_or_else(|| {
        config_error(field, &format!("must be a positive int of 32 bits, not {value}"))
    })
}

/// A number of at least 0; anything else is a configuration error.
pub(crate) fn config_count(field: &str, value: i64) -> PyResult<u32> {
    u32::try_from(value)
        .map_err(|_| config_error(field, &format!("must be an int of at least 0, not {value}")))
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
const MAMBA_FIELDS: [&str; 7] = [
    "block_size",
    "shapes",
    "dtypes",
    "page_size_padded",
    "mamba_type",
    "mamba_cache_mode",
    "num_speculative_blocks",
];

/// A spec class that is known, by exact name: a subclass may follow other rules.
struct KnownSpec {
    class: &'static str,
    /// All fields it may have, in parts.
    fields: [&'static [&'static str]; 4],
    kind: fn(&Bound<'_, PyAny>) -> PyResult<AttentionKind>,
}

const KNOWN_SPECS: [KnownSpec; 11] = [
    KnownSpec {
        class: "FullAttentionSpec",
        fields: [&ATTENTION_FIELDS, &FULL_FIELDS, &[], &[]],
        kind: |_| Ok(AttentionKind::FullAttention),
    },
    KnownSpec {
        class: "TQFullAttentionSpec",
        fields: [&ATTENTION_FIELDS, &FULL_FIELDS, &["tq_slot_size"], &[]],
        kind: |_| Ok(AttentionKind::FullAttention),
    },
    KnownSpec {
        class: "MLAAttentionSpec",
        fields: [&ATTENTION_FIELDS, &FULL_FIELDS, &MLA_FIELDS, &[]],
        kind: |_| Ok(AttentionKind::MLAAttention),
    },
    KnownSpec {
        class: "HiddenStateCacheSpec",
        fields: [&ATTENTION_FIELDS, &FULL_FIELDS, &MLA_FIELDS, &[]],
        kind: |_| Ok(AttentionKind::MLAAttention),
    },
    KnownSpec {
        class: "RSWASpec",
        fields: [&ATTENTION_FIELDS, &FULL_FIELDS, &["rswa_window"], &[]],
        kind: |spec| Ok(AttentionKind::RSWA { rswa_window: field(spec, "rswa_window")? }),
    },
    KnownSpec {
        class: "SinkFullAttentionSpec",
        fields: [&ATTENTION_FIELDS, &FULL_FIELDS, &["sink_len"], &[]],
        kind: |spec| Ok(AttentionKind::SinkFullAttention { sink_len: field(spec, "sink_len")? }),
    },
    KnownSpec {
        class: "SlidingWindowSpec",
        fields: [&ATTENTION_FIELDS, &["sliding_window", "head_size_v"], &[], &[]],
        kind: |spec| {
            Ok(AttentionKind::SlidingWindow { sliding_window: field(spec, "sliding_window")? })
        },
    },
    KnownSpec {
        class: "SlidingWindowMLASpec",
        fields: [&ATTENTION_FIELDS, &["sliding_window", "head_size_v"], &MLA_FIELDS, &[]],
        kind: |spec| {
            Ok(AttentionKind::SlidingWindowMLA { sliding_window: field(spec, "sliding_window")? })
        },
    },
    KnownSpec {
        class: "ChunkedLocalAttentionSpec",
        fields: [&ATTENTION_FIELDS, &["attention_chunk_size"], &[], &[]],
        kind: |spec| {
            let attention_chunk_size = field(spec, "attention_chunk_size")?;
            Ok(AttentionKind::ChunkedLocalAttention { attention_chunk_size })
        },
    },
    KnownSpec { class: "MambaSpec", fields: [&MAMBA_FIELDS, &[], &[], &[]], kind: mamba },
    KnownSpec {
        class: "CrossAttentionSpec",
        fields: [&ATTENTION_FIELDS, &[], &[], &[]],
        kind: |_| Ok(AttentionKind::CrossAttention),
    },
];

fn field(spec: &Bound<'_, PyAny>, name: &str) -> PyResult<u32> {
    positive(name, &spec.getattr(name)?)
}

fn mamba(spec: &Bound<'_, PyAny>) -> PyResult<AttentionKind> {
    let mode: String = spec.getattr("mamba_cache_mode")?.extract()?;
    let mamba_cache_mode = match mode.as_str() {
        "none" => MambaCacheMode::None,
        "all" => MambaCacheMode::All,
        "align" => MambaCacheMode::Align,
        _ => {
            let reason = format!("must be none, all or align, not {mode:?}");
            return Err(config_error("mamba_cache_mode", &reason));
        }
    };
    let drafts = spec.getattr("num_speculative_blocks")?.extract()?;
    let num_speculative_blocks = count("num_speculative_blocks", drafts)?;
    Ok(AttentionKind::Mamba { mamba_cache_mode, num_speculative_blocks })
}

/// The groups of a configuration. Specs that Python finds equal get the same layout number.
pub(crate) fn groups(kv_cache_config: &Bound<'_, PyAny>) -> PyResult<Vec<KVCacheGroupSpec>> {
    let mut layouts: Vec<Bound<'_, PyAny>> = Vec::new();
    let mut groups = Vec::new();
    for group in kv_cache_config.getattr("kv_cache_groups")?.try_iter()? {
        let group = group?;
        let is_eagle_group = match group.getattr_opt("is_eagle_group")? {
            Some(flag) => flag.is_truthy()?,
            None => false,
        };
        let python_spec = group.getattr("kv_cache_spec")?;
        let mut spec = spec(&python_spec)?;
        let mut known = None;
        for (layout, other) in layouts.iter().enumerate() {
            if known.is_none() && other.eq(&python_spec)? {
                known = Some(layout);
            }
        }
        let layout = known.unwrap_or_else(|| {
            layouts.push(python_spec);
            layouts.len() - 1
        });
        spec.layout = u32::try_from(layout).unwrap_or(u32::MAX);
        groups.push(KVCacheGroupSpec { spec, is_eagle_group });
    }
    Ok(groups)
}

fn spec(spec: &Bound<'_, PyAny>) -> PyResult<KVCacheSpec> {
    let class = spec.get_type().name()?.to_string();
    let (known, custom) = known_spec(spec.py(), &class)?;
    if spec.hasattr("__dataclass_fields__")? {
        let fields = spec.py().import("dataclasses")?.call_method1("fields", (spec,))?;
        for field in fields.try_iter()? {
            let name: String = field?.getattr("name")?.extract()?;
            let is_known = known.fields.iter().any(|part| part.contains(&name.as_str()));
            if !is_known && !custom.contains(&name) {
                return Err(config_error(
                    "kv_cache_spec",
                    &format!("{class} has a field {name:?} that this version does not know"),
                ));
            }
        }
    }
    let block_size = count("block_size", spec.getattr("block_size")?.extract()?)?;
    Ok(KVCacheSpec { kind: (known.kind)(spec)?, block_size, layout: 0 })
}

/// A class of vLLM's, or one that the user registered as such; with the fields that it has besides.
fn known_spec(py: Python<'_>, class: &str) -> PyResult<(&'static KnownSpec, Vec<String>)> {
    let builtin = |class: &str| KNOWN_SPECS.iter().find(|known| known.class == class);
    if let Some(known) = builtin(class) {
        return Ok((known, Vec::new()));
    }
    let registry = py.import("kvyard.specs.registry")?.getattr("registered_kv_cache_specs")?;
    let registered: Option<(String, Vec<String>)> =
        registry.call_method1("get", (class,))?.extract()?;
    if let Some((base, fields)) = registered
        && let Some(known) = builtin(&base)
    {
        return Ok((known, fields));
    }
    let reason = if class == "EncoderOnlyAttentionSpec" {
        "EncoderOnlyAttentionSpec needs no KV cache: leave its layers out of the groups".to_owned()
    } else {
        let known: Vec<&str> = KNOWN_SPECS.iter().map(|known| known.class).collect();
        format!("{class} is not known; known are {} and registered ones", known.join(", "))
    };
    Err(config_error("kv_cache_spec", &reason))
}
