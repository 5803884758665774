//! The block pool by itself: transitions (`manager.md` §1.3), duplicates (§4.1), keys (§4.3 to §4.5),
//! and what misuse gets (§10, *Strict*).

mod fixture;
mod keys;
mod misuse;
mod transitions;
