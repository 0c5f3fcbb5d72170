//! What can go wrong between this crate and a GPU.

use std::error::Error;
use std::fmt;

/// A failure of a driver, a compiler, a BLAS library, or of a call that they could not have met.
#[derive(Debug)]
#[non_exhaustive]
pub enum GpuError {
    /// A vendor's library is not on this machine, or not where programs look.
    MissingLibrary {
        /// What it is for and its file names.
        what: String,
        /// How to get it.
        help: &'static str,
    },
    /// A library is there but too old (or too new) for this program.
    MissingSymbol {
        /// The library's file.
        library: String,
        /// The function that it lacks.
        symbol: String,
    },
    /// The driver works and has no such device.
    NoDevice {
        /// What was asked for, as [`crate::DeviceChoice`] prints it.
        choice: String,
        /// How many devices the driver has.
        n_devices: u32,
    },
    /// A call of the driver, the compiler or the BLAS library failed.
    Call {
        /// The vendor's name of the function.
        call: &'static str,
        /// The vendor's error code.
        code: i32,
        /// The vendor's text for it.
        text: String,
    },
    /// No room on the device, or for page-locked host memory.
    OutOfMemory {
        /// The vendor's name of the function.
        call: &'static str,
        /// Bytes asked for.
        requested: usize,
        /// Bytes free on the device at that time.
        free: usize,
        /// Bytes that the device has.
        total: usize,
    },
    /// A kernel's source did not compile.
    Compile {
        /// The name of the program.
        program: String,
        /// What the compiler printed.
        log: String,
    },
    /// A call whose arguments cannot be right: lengths, shapes, a blocking call in a capture.
    Invalid(String),
}

impl fmt::Display for GpuError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MissingLibrary { what, help } => write!(f, "{what} was not found; {help}"),
            Self::MissingSymbol { library, symbol } => {
                write!(f, "{library} has no function {symbol}: its release does not fit")
            }
            Self::NoDevice { choice, n_devices } => {
                write!(f, "there is no device {choice}: the driver has {n_devices}")
            }
            Self::Call { call, code, text } => write!(f, "{call} failed: {text} (code {code})"),
            Self::OutOfMemory { call, requested, free, total } => write!(
                f,
                "{call}: no room for {requested} bytes; the device has {free} of {total} bytes free"
            ),
            Self::Compile { program, log } => write!(f, "{program} does not compile:\n{log}"),
            Self::Invalid(what) => f.write_str(what),
        }
    }
}

impl Error for GpuError {}

/// Shorthand for a call that its arguments rule out.
pub(crate) fn invalid<T>(what: impl Into<String>) -> Result<T, GpuError> {
    Err(GpuError::Invalid(what.into()))
}
