//! Tests on whole and on damaged checkpoints.
