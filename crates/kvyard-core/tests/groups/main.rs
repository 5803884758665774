//! Groups of every kind, alone and together, by worked examples: `groups.md` §2, the examples of
//! `manager.md` on several groups, and the cases from the field on them. Expected values are those of
//! the specification or follow from it by hand; none is this library's own output.
//!
//! Which blocks are worth a key, and how much is predicted, is private. It shows in which blocks have
//! keys, and in how many blocks may be reserved before a call is refused.

mod allocation;
mod chunked_local;
mod cross_and_sink;
mod eagle;
mod events;
mod fixture;
mod full_attention;
mod hybrid_lookup;
mod mamba;
mod misuse;
mod probes;
mod retention;
mod semantics;
mod sliding_window;
mod soundness;
mod written;
