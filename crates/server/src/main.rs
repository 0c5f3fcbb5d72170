//! The `tandem` program.

fn main() {}
