//! Whole-engine tests.

