//! The checkpoints that ship with the project, found by name.
