//! Admission, chunked prefill, preemption and acceptance bookkeeping.
