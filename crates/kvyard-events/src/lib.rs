//! The KV event stream: what a pool announces about its prefix cache, as routers read it.
//!
//! `encode` turns the core's event log into one msgpack batch, `decode` reads any such batch, of
//! vLLM, of `SGLang` or ours. `live_set` keeps what a router that comes late must be told, and
//! `prefix_index` is such a router's memory.
//!
//! Pure: no I/O, no clock, no threads. Depends on `kvyard-core` alone; the part of msgpack that
//! events need is a page. Modules in dependency order; each imports only from those before it.

#![forbid(unsafe_code)]

pub mod error;

mod msgpack;

pub mod wire_format;

pub mod event;

pub mod encode;

pub mod decode;

mod uniform;

pub mod live_set;

pub mod prefix_index;

pub use decode::{Batch, read_batch};
pub use encode::{BatchEncoder, GroupDescription, HashForm, encode_events};
pub use error::DecodeError;
pub use event::{BlockRemoved, BlockStored, Event, ExternalBlockHash};
pub use live_set::LiveSet;
pub use prefix_index::{PrefixIndex, Prompt, WorkerId};
pub use wire_format::WireFormat;
