//! Tests of the scheduler against scripted outcomes.

mod commit;
mod faults;
mod planning;
mod prefix;
mod submit;
mod support;
