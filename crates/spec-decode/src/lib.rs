//! Draft proposal and rejection sampling, for any model that can take a draft step.

mod draft_model;

pub use draft_model::{DraftError, DraftInput, DraftModel};
