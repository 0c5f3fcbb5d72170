//! What `quantization_config` says of each tensor.
//!
//! A file says itself how most of its tensors are stored: by their dtypes, their shapes and the
//! scales beside them. The config is asked for what a file does not say (the size of a block, what
//! packed bytes mean), and whether a tensor may be quantised at all.

mod names;
mod parse;

#[cfg(test)]
mod tests;

use names::NamePatterns;
pub(crate) use parse::quantization;

/// Columns of a row that share a scale in the microscaling formats.
pub(crate) const MX_GROUP: usize = 32;

/// How the values of a weight `[n_out, n_in]` are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WeightFormat {
    /// E4M3 with one scale.
    Fp8Tensor,
    /// E4M3 with one scale a row.
    Fp8Channel,
    /// E4M3 with one scale for each tile of `[rows, columns]`.
    Fp8Block([usize; 2]),
    /// E4M3 with one power of two for each 32 columns of a row.
    Mxfp8,
    /// E2M1, two values a byte, with one power of two for each 32 columns of a row.
    Mxfp4,
}

/// What a config says of the storage of one tensor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeclaredFormats {
    /// The formats that it may have; more than one where patterns overlap, none where nothing
    /// quantises it.
    pub formats: Vec<WeightFormat>,
    /// The entry of the exclusion list that leaves it unquantised.
    pub excluded_by: Option<String>,
}

/// A validated `quantization_config`. How activations are quantised does not matter here: they are
/// not.
#[derive(Clone, Debug, PartialEq)]
pub struct QuantizationConfig {
    /// `quant_method`.
    pub method: String,
    /// For tensors that no rule names.
    default: Vec<WeightFormat>,
    /// Names and their format; `None` leaves them unquantised.
    rules: Vec<(NamePatterns, Option<WeightFormat>)>,
    excluded: NamePatterns,
}

impl QuantizationConfig {
    /// What is said of the tensor of this name in the checkpoint.
    ///
    /// Names are matched against the tensor, its module, each module around it, and the fused
    /// modules that other engines make of it. Where several rules match, all of them count:
    /// tools differ in which one wins, and the file shows it.
    #[must_use]
    pub fn declared(&self, tensor: &str) -> DeclaredFormats {
        let names = names::names_of(tensor);
        let excluded_by = self.excluded.find(&names).map(str::to_owned);
        let mut matching = self.rules.iter().filter(|(rule, _)| rule.find(&names).is_some());
        let formats = match matching.next() {
            _ if excluded_by.is_some() => Vec::new(),
            None => self.default.clone(),
            Some(first) => [first].into_iter().chain(matching).filter_map(|rule| rule.1).collect(),
        };
        DeclaredFormats { formats, excluded_by }
    }
}
