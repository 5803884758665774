//! Extra keys: what besides its tokens decides a block's keys and values. Adapter, media items,
//! cache salt and prompt embeddings, in this order; `manager.md` §3.4, vLLM's
//! `generate_block_hash_extra_keys` (`v1/core/kv_cache_utils.py`).

use super::{Encoder, Object};
use crate::error::{KVCacheError, Result};
use crate::semantics::{HashDomains, MediaCursor};
use sha2::{Digest as _, Sha256};
use std::ops::Range;
use std::sync::Arc;

/// A str member of the extra keys.
///
/// Pickle writes the second use of one Python object as a reference, so that under the pickled
/// algorithms the hash of a block with two equal texts depends on whether they are one object.
/// `identity` says so: texts of one request with the same identity are one object. A clone therefore
/// is the same object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Text {
    /// Its characters.
    pub text: Arc<str>,
    /// Which object of its request it is.
    pub identity: u32,
}

impl Text {
    /// A text of the given identity.
    pub fn new(text: impl Into<Arc<str>>, identity: u32) -> Self {
        Self { text: text.into(), identity }
    }
}

/// Numbers the texts of one request, so that each is an object of its own.
#[derive(Clone, Debug, Default)]
pub struct Texts {
    next_identity: u32,
}

impl Texts {
    /// No text yet.
    pub const fn new() -> Self {
        Self { next_identity: 0 }
    }

    /// A text that is a different object from all before it, even from equal ones.
    pub fn distinct(&mut self, text: impl Into<Arc<str>>) -> Text {
        let identity = self.next_identity;
        self.next_identity += 1;
        Text::new(text, identity)
    }
}

/// A request's adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lora {
    /// Its name: the key of 0.25.1.
    pub name: Text,
    /// Where it was loaded from, which tells two adapters of one name apart. Hashed only under
    /// [`HashDomains::Tagged`].
    pub path: Option<Text>,
    /// Its number in the engine; events carry it, hashes do not.
    pub id: i64,
}

/// An image, a sound, a video: a run of placeholder tokens in a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediaItem {
    /// Names its content (vLLM: `mm_feature.identifier`).
    pub identifier: Text,
    /// Position of its first placeholder token in the request.
    pub offset: u32,
    /// How many placeholder tokens it has.
    pub length: u32,
}

impl MediaItem {
    /// The position after its last placeholder token.
    pub(crate) fn end(&self) -> u64 {
        u64::from(self.offset) + u64::from(self.length)
    }
}

/// Embeddings that a request brings in place of prompt tokens.
#[derive(Clone, PartialEq, Eq)]
pub struct PromptEmbeds {
    bytes: Arc<[u8]>,
    bytes_per_token: usize,
    mask: Option<Arc<[u8]>>,
}

impl PromptEmbeds {
    /// From the little-endian, contiguous bytes of a tensor (positions, hidden size), of which each
    /// position has `bytes_per_token`. `mask` says, one byte a position, which positions take their
    /// embedding from the tensor, in requests that mix both; it is hashed only under
    /// [`HashDomains::Tagged`].
    ///
    /// # Errors
    /// `InvalidArgument` if the bytes are no whole number of positions.
    pub fn new(bytes: Arc<[u8]>, bytes_per_token: usize, mask: Option<Arc<[u8]>>) -> Result<Self> {
        if bytes_per_token == 0 || !bytes.len().is_multiple_of(bytes_per_token) {
            return Err(KVCacheError::argument(
                "prompt_embeds",
                format!(
                    "{} bytes are no whole number of positions of {bytes_per_token} bytes",
                    bytes.len()
                ),
            ));
        }
        Ok(Self { bytes, bytes_per_token, mask })
    }

    /// How many positions the tensor has.
    pub fn num_positions(&self) -> usize {
        self.bytes.len() / self.bytes_per_token
    }

    /// The key of a block. Past the end of the tensor there is nothing left to hash, but vLLM still
    /// adds the digest of nothing.
    fn key(&self, block: &Range<usize>) -> ExtraKey {
        let positions = self.num_positions();
        let start = block.start.min(positions) * self.bytes_per_token;
        let end = block.end.min(positions) * self.bytes_per_token;
        ExtraKey::PromptEmbeds {
            digest: Sha256::digest(&self.bytes[start..end]).into(),
            mask: self
                .mask
                .as_ref()
                .map(|mask| mask[block.start.min(mask.len())..block.end.min(mask.len())].into()),
        }
    }
}

impl std::fmt::Debug for PromptEmbeds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PromptEmbeds")
            .field("positions", &self.num_positions())
            .field("bytes_per_token", &self.bytes_per_token)
            .field("has_mask", &self.mask.is_some())
            .finish_non_exhaustive()
    }
}

/// One member of a block's extra keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExtraKey {
    /// The adapter; in every block.
    Lora {
        /// Its name.
        name: Text,
        /// Where it was loaded from.
        path: Option<Text>,
    },
    /// A media item that overlaps the block.
    Media {
        /// Names its content.
        identifier: Text,
        /// Where it starts, from the start of the block; negative if in an earlier one.
        offset: i64,
    },
    /// The cache salt; in the first block.
    CacheSalt(Text),
    /// Prompt embeddings; in every block.
    PromptEmbeds {
        /// SHA-256 of the block's part of the tensor.
        digest: [u8; 32],
        /// The block's part of the mask.
        mask: Option<Arc<[u8]>>,
    },
    /// A bytes member of extra keys that somebody else made; it has no domain, so no tag.
    Bytes {
        /// Its content.
        bytes: Arc<[u8]>,
        /// Equal numbers are the same Python object; [`PARENT_IDENTITY`](super::PARENT_IDENTITY) is
        /// the parent hash.
        identity: u32,
    },
}

/// The names of the domains, as vLLM 0.33 writes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Domain {
    Lora,
    Media,
    CacheSalt,
    PromptEmbeds,
}

impl Domain {
    const fn name(self) -> &'static str {
        match self {
            Self::Lora => "lora",
            Self::Media => "mm",
            Self::CacheSalt => "cache_salt",
            Self::PromptEmbeds => "prompt_embeds",
        }
    }
}

/// Serialises the extra keys of a block: `None`, or a tuple.
pub(super) fn encode<E: Encoder>(keys: &[ExtraKey], domains: HashDomains, encoder: &mut E) {
    if keys.is_empty() {
        encoder.none();
        return;
    }
    encoder.begin_tuple(keys.len());
    for key in keys {
        match domains {
            HashDomains::Bare => encode_bare(key, encoder),
            HashDomains::Tagged => encode_tagged(key, encoder),
        }
    }
    encoder.end_tuple(keys.len());
}

fn encode_text<E: Encoder>(text: &Text, encoder: &mut E) {
    encoder.text(&text.text, Object::Text(text.identity));
}

fn encode_bare<E: Encoder>(key: &ExtraKey, encoder: &mut E) {
    match key {
        ExtraKey::Lora { name: text, .. } | ExtraKey::CacheSalt(text) => {
            encode_text(text, encoder);
        }
        ExtraKey::Media { identifier, offset } => {
            encoder.begin_tuple(2);
            encode_text(identifier, encoder);
            encoder.integer(*offset);
            encoder.end_tuple(2);
        }
        ExtraKey::PromptEmbeds { digest, .. } => encoder.bytes(digest, Object::Unshared),
        ExtraKey::Bytes { bytes, identity } => encoder.bytes(bytes, Object::Bytes(*identity)),
    }
}

fn encode_tagged<E: Encoder>(key: &ExtraKey, encoder: &mut E) {
    let (domain, len) = match key {
        ExtraKey::Lora { .. } => (Domain::Lora, 3),
        ExtraKey::Media { .. } => (Domain::Media, 3),
        ExtraKey::CacheSalt(_) => (Domain::CacheSalt, 2),
        ExtraKey::PromptEmbeds { mask: None, .. } => (Domain::PromptEmbeds, 2),
        ExtraKey::PromptEmbeds { mask: Some(_), .. } => (Domain::PromptEmbeds, 3),
        ExtraKey::Bytes { bytes, identity } => {
            return encoder.bytes(bytes, Object::Bytes(*identity));
        }
    };
    encoder.begin_tuple(len);
    encoder.text(domain.name(), Object::Tag(domain));
    match key {
        ExtraKey::Lora { name, path } => {
            encode_text(name, encoder);
            match path {
                Some(path) => encode_text(path, encoder),
                None => encoder.none(),
            }
        }
        ExtraKey::Media { identifier, offset } => {
            encode_text(identifier, encoder);
            encoder.integer(*offset);
        }
        ExtraKey::CacheSalt(salt) => encode_text(salt, encoder),
        ExtraKey::PromptEmbeds { digest, mask } => {
            encoder.bytes(digest, Object::Unshared);
            if let Some(mask) = mask {
                encoder.bytes(mask, Object::Unshared);
            }
        }
        ExtraKey::Bytes { .. } => {}
    }
    encoder.end_tuple(len);
}

/// Where a request's extra keys come from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExtraKeySource {
    lora: Option<Lora>,
    media: Vec<MediaItem>,
    /// For each media item the largest end up to it. Items may contain one another, so that ends
    /// alone are in no order; these are, and can be searched.
    media_ends: Vec<u64>,
    cache_salt: Option<Text>,
    prompt_embeds: Option<PromptEmbeds>,
}

impl ExtraKeySource {
    /// Checks and takes the parts. An empty salt is none, as in vLLM.
    ///
    /// # Errors
    /// `InvalidArgument` if the media items are not in the order of their offsets.
    pub fn new(
        lora: Option<Lora>,
        media: Vec<MediaItem>,
        cache_salt: Option<Text>,
        prompt_embeds: Option<PromptEmbeds>,
    ) -> Result<Self> {
        if let Some(pair) = media.windows(2).find(|pair| pair[0].offset > pair[1].offset) {
            return Err(KVCacheError::argument(
                "media",
                format!(
                    "items must be sorted by offset, but {} comes before {}",
                    pair[0].offset, pair[1].offset
                ),
            ));
        }
        let media_ends = media
            .iter()
            .scan(0, |largest, item| {
                *largest = item.end().max(*largest);
                Some(*largest)
            })
            .collect();
        let cache_salt = cache_salt.filter(|salt| !salt.text.is_empty());
        Ok(Self { lora, media, media_ends, cache_salt, prompt_embeds })
    }

    /// The adapter.
    pub const fn lora(&self) -> Option<&Lora> {
        self.lora.as_ref()
    }

    /// The media items, in the order of their offsets.
    pub fn media(&self) -> &[MediaItem] {
        &self.media
    }

    /// The cache salt; never empty.
    pub const fn cache_salt(&self) -> Option<&Text> {
        self.cache_salt.as_ref()
    }

    /// The prompt embeddings.
    pub const fn prompt_embeds(&self) -> Option<&PromptEmbeds> {
        self.prompt_embeds.as_ref()
    }

    /// Whether no block of the request has extra keys.
    pub fn is_empty(&self) -> bool {
        self.lora.is_none()
            && self.media.is_empty()
            && self.cache_salt.is_none()
            && self.prompt_embeds.is_none()
    }

    /// Numbers further texts of the same request.
    pub fn texts(&self) -> Texts {
        let lora = self.lora.iter().flat_map(|lora| std::iter::once(&lora.name).chain(&lora.path));
        let media = self.media.iter().map(|item| &item.identifier);
        let largest = lora.chain(media).chain(&self.cache_salt).map(|text| text.identity).max();
        Texts { next_identity: largest.map_or(0, |identity| identity + 1) }
    }

    /// The same with these media items in place of its own.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_media(&self, media: Vec<MediaItem>) -> Result<Self> {
        Self::new(self.lora.clone(), media, self.cache_salt.clone(), self.prompt_embeds.clone())
    }

    /// The first media item that ends after `position`: the cursor from which the keys of a block
    /// that starts there are complete. As many as there are items if none does.
    pub fn first_media_ending_after(&self, position: usize) -> usize {
        self.media_ends.partition_point(|&end| end <= position as u64)
    }

    /// The media item from which to look when the keys of a block are wanted that starts at `start`, and
    /// none before it was looked at.
    pub fn media_cursor_at(&self, start: usize, rule: MediaCursor) -> isize {
        match rule {
            _ if start == 0 || self.media.is_empty() => 0,
            MediaCursor::LastItem => -1,
            MediaCursor::FirstOverlap => self.first_media_ending_after(start).cast_signed(),
        }
    }

    /// Appends the extra keys of the block at these token positions.
    ///
    /// `cursor` is the media item from which to look, and the result is the one for the block after
    /// this. Pass 0 for the first block; −1 stands for the last item, as vLLM passes it. Items before
    /// the cursor are not seen. Where no item can overlap, the cursor comes back as it was.
    ///
    /// # Panics
    /// If the cursor is negative beyond the number of items, while some could overlap.
    pub fn append_block_keys(
        &self,
        block: Range<usize>,
        cursor: isize,
        keys: &mut Vec<ExtraKey>,
    ) -> isize {
        if let Some(Lora { name, path, .. }) = &self.lora {
            keys.push(ExtraKey::Lora { name: name.clone(), path: path.clone() });
        }
        let cursor = self.append_media_keys(&block, cursor, keys);
        if block.start == 0 {
            keys.extend(self.cache_salt.clone().map(ExtraKey::CacheSalt));
        }
        keys.extend(self.prompt_embeds.as_ref().map(|embeds| embeds.key(&block)));
        cursor
    }

    /// The key of a block's part of the prompt embeddings; none without embeddings.
    pub fn prompt_embeds_of(&self, block: &Range<usize>) -> Option<ExtraKey> {
        self.prompt_embeds.as_ref().map(|embeds| embeds.key(block))
    }

    /// The most keys that `append_block_keys` appends for so many adjoining blocks together.
    pub fn most_block_keys(&self, blocks: usize) -> usize {
        if self.is_empty() {
            return 0;
        }
        // Adapter, salt and embeddings in each; each item in the block where it ends, and at most one
        // in each block that does not end there.
        4 * blocks + self.media.len()
    }

    fn append_media_keys(
        &self,
        block: &Range<usize>,
        cursor: isize,
        keys: &mut Vec<ExtraKey>,
    ) -> isize {
        let (start, end) = (block.start as u64, block.end as u64);
        // vLLM asks the last item only, even if an earlier one ends later.
        if self.media.last().is_none_or(|last| last.end() <= start) {
            return cursor;
        }
        let counted_from = if cursor < 0 { self.media.len() } else { 0 };
        let mut next = counted_from
            .checked_add_signed(cursor)
            .expect("a negative media cursor counts from the end of the items");
        while let Some(item) = self.media.get(next) {
            if end <= u64::from(item.offset) {
                break;
            }
            if start < item.end() {
                keys.push(ExtraKey::Media {
                    identifier: item.identifier.clone(),
                    offset: i64::from(item.offset) - start.cast_signed(),
                });
                if end < item.end() {
                    break;
                }
            }
            next += 1;
        }
        next.cast_signed()
    }
}
