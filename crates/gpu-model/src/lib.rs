//! DeepSeek and GLM models on a GPU.
//!
//! **Owns** the forward pass of the DeepSeek-V3 family and of its MTP layers as a list of launches
//! on one stream, the weights and caches on the device. **Must not know** requests, plans, or how
//! tokens are chosen on the host.
//!
//! Invariants:
//! * Nothing of a pass is read back before its end, so that passes can be captured.
//! * Rows do not depend on their batch mates but in the last bits of the vendor's matrix products.

mod any;
mod decode;
mod device;
mod error;
mod expansion;
mod layer;
mod loader;
mod memory;
mod model;
mod outgoing;
mod parts;
mod pass;
mod sizes;
mod weights;
mod workspace;

pub use any::AnyModel;
pub use decode::{
    CapturedStep, DecodeOptions, SlotResult, StepGraphs, StepPart, StepTimes, TableUpdate,
};
pub use device::PassLimits;
pub use error::ModelError;
pub use gpu_kernels::SlotRecord;
pub use loader::Element;
pub use memory::MemoryNeeds;
pub use model::{DraftPass, GpuModel, HiddenRows, Selected, check_architecture};
