//! What is reused from batch to batch of events.

use kvyard_core::spec::AttentionKind;
use kvyard_events::{BatchEncoder, GroupDescription, HashForm, WireFormat};

/// What an encoder depends on, but for the format, which it knows: the width of the hashes, how many
/// groups are described (a pool describes none, its manager all), and whether hashes are integers.
type MadeFor = (usize, usize, bool);

/// An encoder and the buffer that it writes into.
#[derive(Debug, Default)]
pub(crate) struct BatchWriter {
    pub(crate) encoder: Option<(BatchEncoder, MadeFor)>,
    pub(crate) payload: Vec<u8>,
}

impl BatchWriter {
    /// Has an encoder for these, the one it had if that will do.
    pub(crate) fn prepare(
        &mut self,
        kinds: &[AttentionKind],
        use_int_hashes: bool,
        width: usize,
        format: WireFormat,
    ) {
        let made_for = (width, kinds.len(), use_int_hashes);
        let fits = |(encoder, for_): &(BatchEncoder, MadeFor)| {
            encoder.format() == format && *for_ == made_for
        };
        if !self.encoder.as_ref().is_some_and(fits) {
            let form = if use_int_hashes { HashForm::Integer } else { HashForm::Bytes };
            let groups = kinds.iter().map(GroupDescription::from).collect();
            self.encoder = Some((BatchEncoder::new(format, form, width, groups), made_for));
        }
    }
}
