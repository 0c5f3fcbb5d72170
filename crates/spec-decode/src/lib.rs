//! Draft proposal and rejection sampling, for any model that can take a draft step.
//!
//! **Owns** the loop of draft steps ([`EagleProposer`]), the index arrays of a verify step
//! ([`SpecDecodeMetadata`]), greedy verification and rejection sampling ([`AcceptedRuns`]), the
//! synthetic acceptance of benches ([`SyntheticAcceptance`]), and the trait that a model implements
//! to draft ([`DraftModel`]). **Must not know** any model, weights, requests, or how KV blocks are
//! owned.
//!
//! Invariants: drafts never change what a run emits (its distribution, where tokens are sampled),
//! only how long it is; each draft step's layout is built from its own batch; a sequence's drafts
//! and runs do not depend on its batch mates \[INV-11].
//!
//! [`oracle`] verifies one window at a time with plain f64 loops, for tests.
//!
//! # Example
//!
//! Three drafts of which the target confirms two, beside a sequence without drafts:
//!
//! ```
//! use spec_decode::{AcceptedRuns, SpecDecodeMetadata};
//!
//! let mut metadata = SpecDecodeMetadata::default();
//! metadata.push(0..4, &[11, 12, 13]);
//! metadata.push(4..5, &[]);
//! // What the target itself chose at the rows `metadata.logits_rows()` of the batch.
//! let target_ids = [11, 12, 99, 14, 50];
//! let mut runs = AcceptedRuns::default();
//! runs.verify_greedy(&metadata, &target_ids);
//! assert_eq!((runs.n_accepted(0), runs.run(0)), (2, &[11, 12, 99][..]));
//! assert_eq!((runs.n_accepted(1), runs.run(1)), (0, &[50][..]));
//! ```

mod draft_model;
mod error;
mod index_share;
mod metadata;
pub mod oracle;
mod proposer;
mod rejection;
mod sampled;
mod synthetic;

pub use draft_model::{DraftError, DraftInput, DraftModel, DraftOutput};
pub use error::SpecDecodeError;
pub use index_share::{DraftMethod, IndexShare, IndexShareFacts};
pub use metadata::SpecDecodeMetadata;
pub use proposer::{DraftDraws, DraftSeq, EagleProposer, Proposal};
pub use rejection::AcceptedRuns;
pub use sampled::DraftProbs;
pub use synthetic::SyntheticAcceptance;
