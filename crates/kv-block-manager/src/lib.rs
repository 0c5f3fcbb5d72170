//! Reference-counted KV blocks and block tables.
