//! Random numbers that depend on the seed alone.

/// The splitmix64 generator.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// A generator for `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(mix(seed, 0x5eed))
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        scramble(self.0)
    }

    /// A number in `low..=high`.
    pub fn between(&mut self, low: u32, high: u32) -> u32 {
        assert!(low <= high);
        let n = self.next_u64() % (u64::from(high - low) + 1);
        low + u32::try_from(n).expect("below a u32")
    }

    /// Whether an event of `percent` per cent happens.
    pub fn chance(&mut self, percent: u32) -> bool {
        self.between(0, 99) < percent
    }

    /// One of `choices`.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        let n = self.next_u64() % choices.len() as u64;
        choices[usize::try_from(n).expect("an index")]
    }

    /// Puts `items` in a random order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            let n = self.next_u64() % (last as u64 + 1);
            items.swap(last, usize::try_from(n).expect("an index"));
        }
    }
}

/// One number made of two.
#[must_use]
pub(crate) fn mix(a: u64, b: u64) -> u64 {
    scramble(a.rotate_left(23) ^ b.wrapping_mul(0xd6e8_feb8_6659_fd93).wrapping_add(1))
}

fn scramble(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
