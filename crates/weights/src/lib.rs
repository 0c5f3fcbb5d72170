//! Checkpoint shards to named tensors.
