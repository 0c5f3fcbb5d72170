//! Which device a user asks for.

use std::fmt;
use std::str::FromStr;

/// A choice of device: `auto`, `cpu`, `cuda:N` or `rocm:N`; `cuda` is `cuda:0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DeviceChoice {
    /// The first CUDA device, else the first ROCm device, else none.
    #[default]
    Auto,
    /// No GPU.
    Cpu,
    /// A CUDA device by the driver's ordinal.
    Cuda(u32),
    /// A ROCm device by the driver's ordinal.
    Rocm(u32),
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(n) => write!(f, "cuda:{n}"),
            Self::Rocm(n) => write!(f, "rocm:{n}"),
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = ParseChoiceError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let fault = || ParseChoiceError(text.to_owned());
        let (kind, ordinal) = text.split_once(':').unwrap_or((text, "0"));
        let digits = !ordinal.is_empty() && ordinal.bytes().all(|b| b.is_ascii_digit());
        let ordinal = ordinal.parse().ok().filter(|_| digits).ok_or_else(fault)?;
        match kind {
            "auto" if kind == text => Ok(Self::Auto),
            "cpu" if kind == text => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(ordinal)),
            "rocm" => Ok(Self::Rocm(ordinal)),
            _ => Err(fault()),
        }
    }
}

/// A text that names no device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParseChoiceError(String);

impl fmt::Display for ParseChoiceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` is no device: auto, cpu, cuda:N or rocm:N", self.0)
    }
}

impl std::error::Error for ParseChoiceError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_read_and_printed() {
        for text in ["auto", "cpu", "cuda:0", "cuda:3", "rocm:1"] {
            assert_eq!(text.parse::<DeviceChoice>().unwrap().to_string(), text);
        }
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
        assert_eq!("rocm".parse(), Ok(DeviceChoice::Rocm(0)));
        for text in ["", "gpu", "cuda:", "cuda:x", "cuda:+1", "cuda:-1", "cpu:0", "auto:1", "CUDA"]
        {
            let error = text.parse::<DeviceChoice>().unwrap_err();
            assert!(error.to_string().contains("cuda:N"), "{error}");
        }
    }
}
