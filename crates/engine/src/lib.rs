//! The engine loop: commands in, events out, one thread around a step executor.
