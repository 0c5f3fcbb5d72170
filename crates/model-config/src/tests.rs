//! Tests of reading, refusing and listing.
