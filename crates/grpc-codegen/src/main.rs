//! Generates the code of `grpc-api` from `proto/`.

fn main() {}
