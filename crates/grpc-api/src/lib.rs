//! Generated gRPC types of tandem.inference.v1 and tandem.control.v1.
