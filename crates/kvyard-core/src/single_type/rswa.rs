//! R-SWA: full attention over the prompt, a window over what follows. Between the two a gap opens,
//! whose blocks are released; everything else is full attention's. `groups.md` §2.4.

/// The gap's first block and the block behind its last.
pub(crate) fn gap(
    num_prompt_tokens: u32,
    total_computed: u32,
    rswa_window: u32,
    block_size: u32,
) -> (u32, u32) {
    let window_start = total_computed.saturating_sub(rswa_window);
    (num_prompt_tokens.div_ceil(block_size), num_prompt_tokens.max(window_start) / block_size)
}
