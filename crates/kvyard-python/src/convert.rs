//! From Python values to owned Rust ones: token ids, hashes, and what a request's keys are made of.

use std::sync::Arc;

use kvyard_core::BlockHash;
use kvyard_core::hashing::{ExtraKeySource, Lora, MediaItem, PromptEmbeds, Text};
use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyString, PyTuple};

use crate::error::invalid_argument;

/// A count that may not be negative.
#[inline]
pub(crate) fn count(argument: &'static str, value: i64) -> PyResult<u32> {
    u32::try_from(value)
        .map_err(|_| invalid_argument(argument, format!("must be from 0 to 2^32 - 1, not {value}")))
}

/// Token ids: a C-contiguous buffer of 32- or 64-bit integers, or any iterable of ints.
pub(crate) fn token_ids(values: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    if let Ok(list) = values.cast::<PyList>() {
        return list.iter().map(|token| token_id(&token)).collect();
    }
    if let Some(tokens) = buffer_of::<u32>(values)? {
        return Ok(tokens);
    }
    if let Some(tokens) = buffer_of::<i32>(values)? {
        return tokens.into_iter().map(|token| narrow(i64::from(token))).collect();
    }
    if let Some(tokens) = buffer_of::<i64>(values)? {
        return tokens.into_iter().map(narrow).collect();
    }
    values.try_iter()?.map(|token| token_id(&token?)).collect()
}

fn buffer_of<T: pyo3::buffer::Element>(values: &Bound<'_, PyAny>) -> PyResult<Option<Vec<T>>> {
    match PyBuffer::<T>::get(values) {
        Ok(buffer) if buffer.dimensions() == 1 => buffer.to_vec(values.py()).map(Some),
        _ => Ok(None),
    }
}

#[inline]
fn token_id(token: &Bound<'_, PyAny>) -> PyResult<u32> {
    token.extract().map_err(|_| {
        invalid_argument("token_ids", format!("a token id must be an int of 32 bits, not {token}"))
    })
}

fn narrow(token: i64) -> PyResult<u32> {
    u32::try_from(token).map_err(|_| {
        invalid_argument("token_ids", format!("a token id must be an int of 32 bits, not {token}"))
    })
}

/// A block hash of at most 32 bytes.
pub(crate) fn block_hash(argument: &'static str, bytes: &[u8]) -> PyResult<BlockHash> {
    if bytes.is_empty() || bytes.len() > 32 {
        return Err(invalid_argument(
            argument,
            format!("a block hash has 1 to 32 bytes, not {}", bytes.len()),
        ));
    }
    Ok(BlockHash::from_digest(bytes))
}

/// A list of block hashes of one width, and that width (0 for no hashes).
pub(crate) fn block_hashes(values: &Bound<'_, PyAny>) -> PyResult<(Vec<BlockHash>, usize)> {
    let mut hashes = Vec::with_capacity(values.len().unwrap_or(0));
    let mut width = 0;
    for value in values.try_iter()? {
        let value = value?;
        let bytes = value.cast::<PyBytes>()?.as_bytes();
        if width != 0 && bytes.len() != width {
            return Err(invalid_argument("block_hashes", "all hashes must have the same width"));
        }
        width = bytes.len();
        hashes.push(block_hash("block_hashes", bytes)?);
    }
    Ok((hashes, width))
}

/// Numbers the text and bytes objects of one request: one object, one number. Pickle writes the second
/// use of an object as a reference, so identity decides the bytes that are hashed.
#[derive(Default)]
pub(crate) struct Identities {
    texts: Vec<*const pyo3::ffi::PyObject>,
    bytes: Vec<*const pyo3::ffi::PyObject>,
}

impl Identities {
    pub(crate) fn text(&mut self, value: &Bound<'_, PyString>) -> PyResult<Text> {
        let identity = number(&mut self.texts, value.as_ptr().cast_const())?;
        Ok(Text { text: Arc::from(value.to_cow()?.as_ref()), identity })
    }

    pub(crate) fn bytes(&mut self, value: &Bound<'_, PyBytes>) -> PyResult<u32> {
        number(&mut self.bytes, value.as_ptr().cast_const())
    }

    fn attribute(&mut self, object: &Bound<'_, PyAny>, name: &str) -> PyResult<Text> {
        let value = object.getattr(name)?;
        let value = value.cast::<PyString>().map_err(|_| {
            invalid_argument("extra_keys", format!("{name} must be a str, not {value}"))
        })?;
        self.text(value)
    }
}

fn number(
    seen: &mut Vec<*const pyo3::ffi::PyObject>,
    object: *const pyo3::ffi::PyObject,
) -> PyResult<u32> {
    let known = seen.iter().position(|other| *other == object).unwrap_or_else(|| {
        seen.push(object);
        seen.len() - 1
    });
    u32::try_from(known).map_err(|_| invalid_argument("extra_keys", "too many members"))
}

/// The parts of a request's extra keys, as the constructor of `Request` takes them.
pub(crate) struct KeyParts<'a, 'py> {
    pub(crate) lora_request: Option<&'a Bound<'py, PyAny>>,
    pub(crate) lora_path: Option<&'a Bound<'py, PyAny>>,
    pub(crate) mm_features: Option<&'a Bound<'py, PyAny>>,
    pub(crate) cache_salt: Option<&'a Bound<'py, PyAny>>,
    pub(crate) prompt_embeds: Option<&'a Bound<'py, PyAny>>,
    pub(crate) prompt_embeds_mask: Option<&'a Bound<'py, PyAny>>,
}

impl KeyParts<'_, '_> {
    pub(crate) fn source(&self) -> PyResult<ExtraKeySource> {
        let mut identities = Identities::default();
        let lora = self.lora(&mut identities)?;
        let media = self.media(&mut identities)?;
        let salt = match self.cache_salt {
            Some(salt) => Some(identities.text(salt.cast::<PyString>()?)?),
            None => None,
        };
        ExtraKeySource::new(lora, media, salt, self.embeds()?)
            .map_err(|error| crate::error::to_python(&error))
    }

    fn lora(&self, identities: &mut Identities) -> PyResult<Option<Lora>> {
        let Some(lora) = self.lora_request else {
            return Ok(None);
        };
        let name = if lora.hasattr("lora_name")? { "lora_name" } else { "name" };
        let id = if lora.hasattr("lora_int_id")? { "lora_int_id" } else { "adapter_id" };
        let path = match self.lora_path {
            Some(path) => Some(identities.text(path.cast::<PyString>()?)?),
            None => match lora.getattr_opt("lora_path")? {
                Some(path) if !path.is_none() => Some(identities.text(path.cast::<PyString>()?)?),
                _ => None,
            },
        };
        let id = match lora.getattr_opt(id)? {
            Some(id) => id.extract()?,
            None => 0,
        };
        Ok(Some(Lora { name: identities.attribute(lora, name)?, path, id }))
    }

    fn media(&self, identities: &mut Identities) -> PyResult<Vec<MediaItem>> {
        let Some(features) = self.mm_features else {
            return Ok(Vec::new());
        };
        let mut media = Vec::new();
        for feature in features.try_iter()? {
            let feature = feature?;
            if let Ok(parts) = feature.cast::<PyTuple>() {
                let (identifier, offset, length): (Bound<'_, PyString>, i64, i64) =
                    parts.extract()?;
                media.push(MediaItem {
                    identifier: identities.text(&identifier)?,
                    offset: count("offset", offset)?,
                    length: count("length", length)?,
                });
            } else {
                let position = feature.getattr("mm_position")?;
                media.push(MediaItem {
                    identifier: identities.attribute(&feature, "identifier")?,
                    offset: count("offset", position.getattr("offset")?.extract()?)?,
                    length: count("length", position.getattr("length")?.extract()?)?,
                });
            }
        }
        Ok(media)
    }

    fn embeds(&self) -> PyResult<Option<PromptEmbeds>> {
        let Some(embeds) = self.prompt_embeds else {
            return Ok(None);
        };
        let (bytes, rows) = raw_rows(embeds)?;
        let bytes_per_token = bytes.len().checked_div(rows).unwrap_or(0).max(1);
        let mask = match self.prompt_embeds_mask {
            None => None,
            Some(mask) => {
                let mask: Vec<u8> = mask
                    .try_iter()?
                    .map(|flag| Ok(u8::from(flag?.is_truthy()?)))
                    .collect::<PyResult<_>>()?;
                Some(Arc::from(mask))
            }
        };
        PromptEmbeds::new(bytes.into(), bytes_per_token, mask)
            .map(Some)
            .map_err(|error| crate::error::to_python(&error))
    }
}

/// The bytes of a two-dimensional tensor or array, row after row, and its number of rows.
fn raw_rows(embeds: &Bound<'_, PyAny>) -> PyResult<(Vec<u8>, usize)> {
    let rows = embeds.len()?;
    let array = if embeds.hasattr("detach")? {
        let torch = embeds.py().import("torch")?;
        let tensor = embeds.call_method0("detach")?.call_method0("cpu")?;
        let tensor = tensor.call_method0("contiguous")?;
        tensor.call_method1("view", (torch.getattr("uint8")?,))?.call_method0("numpy")?
    } else {
        embeds.clone()
    };
    let bytes = array.call_method0("tobytes").map_err(|_| {
        invalid_argument("prompt_embeds", "must be a torch tensor or an array with tobytes()")
    })?;
    Ok((bytes.cast::<PyBytes>()?.as_bytes().to_vec(), rows))
}
