//! Tests of the scheduler against scripted outcomes.

mod commit;
mod deferred;
mod faults;
mod planning;
mod policies;
mod prefix;
mod siblings;
mod submit;
mod support;
