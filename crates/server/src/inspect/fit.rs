//! What one GPU of a given size holds of a model.

use clap::{Args, value_parser};
use settings::{Dtype, IndexCacheArg};

/// A size of memory, and what is to be held in it.
#[derive(Debug, Args)]
pub(crate) struct FitArgs {
    /// Tell what one GPU with so much memory (141GiB, 80GB, ...) holds. Usable is that times
    /// --gpu-memory-utilization. Left is usable - weights - batch * context * (KV + index bytes a
    /// token). The most sequences are (usable - weights) / (context * bytes a token), the longest
    /// context is (usable - weights) / (batch * bytes a token) and no more than the model's.
    /// Workspaces, some hundred MiB, are not in it
    #[arg(long, value_parser = memory, value_name = "BYTES")]
    pub(crate) gpu_memory: Option<u64>,
    /// Share of the GPU's memory that is used
    #[arg(long, default_value_t = 0.9, value_parser = share)]
    pub(crate) gpu_memory_utilization: f64,
    /// Tokens of a sequence, for --gpu-memory
    #[arg(long, default_value_t = 32_768, value_parser = value_parser!(u64).range(1..=1 << 32))]
    pub(crate) context: u64,
    /// Sequences at once, for --gpu-memory
    #[arg(long, default_value_t = 16, value_parser = value_parser!(u64).range(1..=1 << 20))]
    pub(crate) batch: u64,
    /// Compute and KV cache dtype [default: the checkpoint's]
    #[arg(long, value_enum)]
    pub(crate) dtype: Option<Dtype>,
    /// How the indexer's keys are cached, in models with sparse attention
    #[arg(long, value_enum, default_value_t = IndexCacheArg::Auto)]
    pub(crate) index_cache_dtype: IndexCacheArg,
}

/// Weights and caches in a memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fit {
    /// Bytes that may be used.
    pub(crate) usable: u64,
    /// Bytes of weights.
    pub(crate) weights: u64,
    /// Bytes of caches a token.
    pub(crate) token: u64,
    /// Tokens of a sequence.
    pub(crate) context: u64,
    /// Sequences at once.
    pub(crate) batch: u64,
    /// Longest sequence of the model, in tokens.
    pub(crate) longest: u64,
}

impl Fit {
    /// Bytes of caches of the batch.
    pub(crate) fn cache(&self) -> u128 {
        u128::from(self.batch) * u128::from(self.context) * u128::from(self.token)
    }

    /// Bytes that are left; negative where they are too few.
    pub(crate) fn left(&self) -> i128 {
        i128::from(self.usable) - i128::from(self.weights) - self.cache() as i128
    }

    /// The most sequences of the context.
    pub(crate) fn max_sequences(&self) -> u64 {
        self.times(self.context)
    }

    /// The longest context that a whole batch can have.
    pub(crate) fn max_context(&self) -> u64 {
        self.times(self.batch).min(self.longest)
    }

    /// How often the caches of so many tokens fit beside the weights.
    fn times(&self, n_tokens: u64) -> u64 {
        let bytes = u128::from(n_tokens) * u128::from(self.token.max(1));
        let times = u128::from(self.usable.saturating_sub(self.weights)) / bytes;
        u64::try_from(times).unwrap_or(u64::MAX)
    }
}

/// Reads a size of memory with or without a unit.
fn memory(text: &str) -> Result<u64, String> {
    const UNITS: [(&str, u64); 9] = [
        ("KiB", 1 << 10),
        ("MiB", 1 << 20),
        ("GiB", 1 << 30),
        ("TiB", 1 << 40),
        ("kB", 1_000),
        ("MB", 1_000_000),
        ("GB", 1_000_000_000),
        ("TB", 1_000_000_000_000),
        ("B", 1),
    ];
    let split = UNITS.iter().find_map(|&(unit, factor)| Some((text.strip_suffix(unit)?, factor)));
    let (number, factor) = split.unwrap_or((text, 1));
    let bytes = number.trim().parse::<f64>().ok().map(|number| number * factor as f64);
    match bytes.filter(|bytes| (1.0..1e18).contains(bytes)) {
        Some(bytes) => Ok(bytes as u64),
        None => Err("give a size such as 141GiB or 80GB".to_owned()),
    }
}

fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share: &f64| *share > 0.0 && *share <= 1.0);
    share.ok_or_else(|| "give a number above 0 and up to 1".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in
            [("141GiB", 141 << 30), ("80GB", 80_000_000_000), ("1.5 MiB", 3 << 19), ("7", 7)]
        {
            assert_eq!(memory(text), Ok(bytes), "{text}");
        }
        for text in ["", "GiB", "much", "-1GB", "0", "NaNGB", "1e30TB", "1XB"] {
            assert!(memory(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_gpu_holds_what_its_memory_allows() {
        let fit =
            Fit { usable: 1000, weights: 300, token: 2, context: 50, batch: 4, longest: 1 << 20 };
        assert_eq!((fit.cache(), fit.left()), (400, 300));
        assert_eq!((fit.max_sequences(), fit.max_context()), (7, 87));
        // What is promised fits, and one more does not.
        assert!(Fit { batch: 7, ..fit }.left() >= 0 && Fit { batch: 8, ..fit }.left() < 0);
        assert!(Fit { context: 87, ..fit }.left() >= 0 && Fit { context: 88, ..fit }.left() < 0);
        assert_eq!(Fit { longest: 64, ..fit }.max_context(), 64);
        let heavy = Fit { weights: 2000, ..fit };
        assert_eq!((heavy.left(), heavy.max_sequences(), heavy.max_context()), (-1400, 0, 0));
    }
}
