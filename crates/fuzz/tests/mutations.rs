//! Each target on its seeds, mutated at random: what needs no search is found here.
//!
//! By hand, with more of them and other ones:
//!
//! ```text
//! TANDEM_FUZZ_CASES=1000000 TANDEM_FUZZ_SEED=7 cargo test -p fuzz --test mutations
//! ```

#![expect(clippy::unwrap_used, reason = "a failure in a test's helper is a failure of the test")]

use std::panic::catch_unwind;

use fuzz::TARGETS;

/// What is put in: where numbers, texts and structures end.
const WORDS: &[&str] = &[
    "0",
    "-1",
    "1e308",
    "1e400",
    "NaN",
    "4294967295",
    "9223372036854775808",
    "18446744073709551615",
    "null",
    "true",
    "[]",
    "{}",
    "\"\"",
    "[[[[",
    "{\"a\":",
    "\\u0000",
    "\\ud800",
    "..",
    "/",
    "\u{FFFD}",
    "▁",
    "{{",
    "}}",
    "{%",
    "%}",
    " ~ ",
    " * 999999999 ",
    "|",
];

fn variable(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().unwrap())
}

/// SplitMix64.
struct Random(u64);

impl Random {
    /// A number below `n`, which is not 0.
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        usize::try_from((mixed ^ (mixed >> 31)) % n as u64).unwrap()
    }

    /// A part of some bytes, mostly a short one.
    fn range(&mut self, n_bytes: usize) -> std::ops::Range<usize> {
        let start = self.below(n_bytes + 1);
        let longest = if self.below(8) == 0 { n_bytes } else { 24 };
        start..n_bytes.min(start + self.below(longest + 1))
    }

    fn mutate(&mut self, bytes: &mut Vec<u8>, other: &[u8]) {
        let range = self.range(bytes.len());
        let put_in = match self.below(5) {
            0 => Vec::new(),
            1 => WORDS[self.below(WORDS.len())].into(),
            2 => other[self.range(other.len())].to_vec(),
            3 => bytes[range.clone()].repeat(2),
            _ => vec![u8::try_from(self.below(256)).unwrap()],
        };
        bytes.splice(range, put_in);
    }
}

#[test]
fn no_mutation_of_a_seed_does_harm() {
    let mut random = Random(variable("TANDEM_FUZZ_SEED", 1));
    for target in TARGETS {
        let seeds = target.seeds();
        assert!(!seeds.is_empty(), "{}", target.name);
        for case in 0..variable("TANDEM_FUZZ_CASES", 1000) {
            let mut input = seeds[random.below(seeds.len())].clone();
            let other = &seeds[random.below(seeds.len())];
            for _ in 0..random.below(6) {
                random.mutate(&mut input, other);
            }
            let ran = catch_unwind(|| (target.run)(&input));
            let text = String::from_utf8_lossy(&input);
            assert!(ran.is_ok(), "case {case} of {}: {text}", target.name);
        }
    }
}
