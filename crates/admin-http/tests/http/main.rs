//! The listener over real sockets, around engines that count up.

mod dashboard;
mod exposition;
mod generate;
mod guard;
mod harness;
mod health;
mod lifecycle;
mod metrics;
