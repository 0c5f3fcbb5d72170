//! Results for readers: Markdown, and one HTML file that needs nothing else.

mod html;
mod markdown;
mod plots;
mod tables;
mod warnings;

use std::fmt;

pub use html::html;
pub use markdown::{comparison_markdown, markdown};
pub use warnings::{Warning, warnings};

/// A report cannot be made.
#[derive(Debug)]
#[non_exhaustive]
pub enum ReportError {
    /// A plot cannot be drawn.
    Plot(String),
    /// The page cannot be filled in.
    Page(minijinja::Error),
}

impl fmt::Display for ReportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plot(error) => write!(f, "a plot cannot be drawn: {error}"),
            Self::Page(error) => write!(f, "the page cannot be filled in: {error}"),
        }
    }
}

impl std::error::Error for ReportError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Plot(_) => None,
            Self::Page(error) => Some(error),
        }
    }
}

/// A number for readers: four figures or all whole ones.
pub(crate) fn number(value: f64) -> String {
    let n_decimals = match value.abs() {
        0.0 => 0,
        size if size >= 1000.0 => 0,
        size if size >= 100.0 => 1,
        size if size >= 10.0 => 2,
        _ => 3,
    };
    format!("{value:.n_decimals$}")
}

/// A share of 1.
fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

#[cfg(test)]
mod tests;
