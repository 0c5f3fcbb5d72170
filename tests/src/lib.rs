//! Shared helpers of the whole-engine tests.
