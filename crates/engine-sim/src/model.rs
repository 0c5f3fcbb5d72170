//! The hash language model: like attention, it looks at the KV of all earlier positions.

use engine_types::{RequestId, TokenId};

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

    /// The token that follows in requests of this voice.
    pub(crate) fn next_token(self, vocab_size: u32, voice: Voice) -> TokenId {
        let n = mix(self.0, 0xf00d ^ voice.0) % u64::from(vocab_size);
        u32::try_from(n).expect("below a u32")
    }
}

/// What siblings differ in, as if they were sampled with seeds of their own: otherwise each would
/// say what the others say, and nobody could tell when they read each other's KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Voice(u64);

impl Voice {
    /// How many requests in a row have voices of their own.
    pub(crate) const N: u32 = 8;
    /// That of all requests without siblings, and of the first of those with some.
    pub(crate) const FIRST: Self = Self(0);

    pub(crate) fn of(id: RequestId) -> Self {
        Self(id.0 % u64::from(Self::N))
    }
}

/// A draft layer's KV entry at position `p`: of what lies below it there (the target's entry, or
/// the entry of the draft layer before) and of the token that the layer embeds, the one at `p + 1`
/// for the first layer, at `p + 2` for the second, and so on.
pub(crate) fn draft_entry(below: u64, embedded: TokenId) -> u64 {
    mix(below, u64::from(embedded) ^ 0xd4af)
}

/// What makes drafts: how good they are and from how many ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Drafter {
    pub(crate) accuracy_percent: u32,
    pub(crate) vocab_size: u32,
}

impl Drafter {
    /// The draft of a layer that has read `read`: what the target would choose, `right`, or another
    /// id. Which of them depends on every KV entry that the layer has read.
    pub(crate) fn draft(self, read: State, right: TokenId) -> TokenId {
        let is_right = mix(read.0, 0xacc) % 100 < u64::from(self.accuracy_percent);
        if is_right { right } else { read.next_token(self.vocab_size, Voice::FIRST) }
    }
}
