//! What the stores of many blocks have in common, kept once and counted.

use std::collections::HashMap;

use crate::event::BlockStored;

/// How a body is made up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Widths {
    /// Bytes of the block's hash at the start; 0 where hashes are numbers.
    pub(super) digest: usize,
    /// Bytes of its announced parent's hash behind it; 0 where there is none, or hashes are numbers.
    pub(super) parent_digest: usize,
    /// Tokens.
    pub(super) num_tokens: u32,
    /// Whether extra keys end it.
    pub(super) has_extra_keys: bool,
}

/// All of a store but its hash, its parent, its tokens and its extra keys.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Template {
    pub(super) widths: Widths,
    block_size: u32,
    group_block_size: Option<u32>,
    lora_id: Option<i64>,
    lora_name: Option<Box<str>>,
    kind: Option<Box<str>>,
    sliding_window: Option<u32>,
    cache_salt: Option<Box<str>>,
}

impl Template {
    fn new(stored: &BlockStored<'_>, widths: Widths) -> Self {
        Self {
            widths,
            block_size: stored.block_size,
            group_block_size: stored.group_block_size,
            lora_id: stored.lora_id,
            lora_name: stored.lora_name.map(Box::from),
            kind: stored.kv_cache_spec_kind.map(Box::from),
            sliding_window: stored.kv_cache_spec_sliding_window,
            cache_salt: stored.cache_salt.map(Box::from),
        }
    }

    /// The store, without what differs between blocks.
    pub(super) fn fields(&self) -> BlockStored<'_> {
        BlockStored {
            block_size: self.block_size,
            group_block_size: self.group_block_size,
            lora_id: self.lora_id,
            lora_name: self.lora_name.as_deref(),
            kv_cache_spec_kind: self.kind.as_deref(),
            kv_cache_spec_sliding_window: self.sliding_window,
            cache_salt: self.cache_salt.as_deref(),
            ..BlockStored::default()
        }
    }

    fn is_of(&self, stored: &BlockStored<'_>, widths: Widths) -> bool {
        self.widths == widths
            && self.block_size == stored.block_size
            && self.group_block_size == stored.group_block_size
            && self.lora_id == stored.lora_id
            && self.lora_name.as_deref() == stored.lora_name
            && self.kind.as_deref() == stored.kv_cache_spec_kind
            && self.sliding_window == stored.kv_cache_spec_sliding_window
            && self.cache_salt.as_deref() == stored.cache_salt
    }

    fn num_bytes(&self) -> usize {
        let texts = [&self.lora_name, &self.kind, &self.cache_salt];
        size_of::<Self>() + texts.into_iter().flatten().map(|text| text.len()).sum::<usize>()
    }
}

/// Templates by number. One that no block uses is forgotten: there may be a salt a tenant.
#[derive(Debug, Default)]
pub(super) struct Templates {
    slots: Vec<Option<(Template, u32)>>,
    vacant: Vec<u32>,
    numbers: HashMap<Template, u32>,
    /// The one held last: blocks of one event share it.
    latest: u32,
}

impl Templates {
    /// The number of the template of a store, which is held until it is released.
    pub(super) fn hold(&mut self, stored: &BlockStored<'_>, widths: Widths) -> u32 {
        if let Some(Some((template, users))) = self.slots.get_mut(self.latest as usize)
            && template.is_of(stored, widths)
        {
            *users += 1;
            return self.latest;
        }
        let template = Template::new(stored, widths);
        let number = if let Some(number) = self.numbers.get(&template) {
            *number
        } else {
            let number = self.vacant.pop().unwrap_or_else(|| {
                self.slots.push(None);
                u32::try_from(self.slots.len() - 1).expect("there are fewer templates than blocks")
            });
            self.slots[number as usize] = Some((template.clone(), 0));
            self.numbers.insert(template, number);
            number
        };
        if let Some((_, users)) = &mut self.slots[number as usize] {
            *users += 1;
        }
        self.latest = number;
        number
    }

    pub(super) fn release(&mut self, number: u32) {
        let slot = &mut self.slots[number as usize];
        if let Some((template, users)) = slot {
            *users -= 1;
            if *users == 0 {
                self.numbers.remove(template);
                *slot = None;
                self.vacant.push(number);
            }
        }
    }

    pub(super) fn get(&self, number: u32) -> &Template {
        let slot = self.slots[number as usize].as_ref();
        &slot.expect("a live block holds its template").0
    }

    pub(super) fn num_bytes(&self) -> usize {
        let kept = self.slots.iter().flatten().map(|(template, _)| 2 * template.num_bytes());
        kept.sum::<usize>() + self.slots.capacity() * size_of::<Option<(Template, u32)>>()
    }
}
