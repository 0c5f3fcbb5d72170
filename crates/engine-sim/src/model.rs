//! The hash language model: like attention, it looks at the KV of all earlier positions.

use engine_types::TokenId;

use crate::rng::mix;

/// What the model has read so far: a fold over KV entries in the order of positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct State(u64);

impl State {
    pub(crate) const EMPTY: Self = Self(0x7a6d);

    /// The KV entry of `token` after what was read.
    pub(crate) fn entry(self, token: TokenId) -> u64 {
        mix(self.0, u64::from(token))
    }

    /// Reads one more entry.
    pub(crate) fn read(self, entry: u64) -> Self {
        Self(mix(self.0.rotate_left(7), entry))
    }

    /// Computes and reads the entry of `token`.
    pub(crate) fn extend(self, token: TokenId) -> Self {
        self.read(self.entry(token))
    }

    /// The token that follows.
    pub(crate) fn next_token(self, vocab_size: u32) -> TokenId {
        let n = mix(self.0, 0xf00d) % u64::from(vocab_size);
        u32::try_from(n).expect("below a u32")
    }
}

/// The draft layer's KV entry for a position: of the target's entry there and the token after it.
pub(crate) fn draft_entry(target_entry: u64, following: TokenId) -> u64 {
    mix(target_entry, u64::from(following) ^ 0xd4af)
}
