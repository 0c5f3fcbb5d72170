//! A live view of a server's figures.

mod draw;
mod facts;
mod history;
mod live;
mod sample;

#[cfg(test)]
mod tests;

pub use draw::draw;
pub use facts::text;
pub use history::{History, Rates};
pub use live::watch;
pub use sample::Sample;
