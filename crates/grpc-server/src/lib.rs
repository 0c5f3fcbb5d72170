//! The gRPC service over an engine handle.
