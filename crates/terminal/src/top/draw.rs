//! The figures on a screen.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize as _};
use ratatui::text::{Line, Span};
use ratatui::widgets::{RenderDirection, Sparkline};

use crate::top::facts::{self, Fact};
use crate::top::history::History;
use crate::top::sample::Sample;

const USED: Style = Style::new().fg(Color::Green);
const CACHED: Style = Style::new().fg(Color::Cyan);
const FREE: Style = Style::new().fg(Color::DarkGray);
/// Columns of the labels.
const LABEL: u16 = 10;
/// Largest number of columns of a bar.
const BAR: u16 = 60;

/// Draws all that fits; `url` is the server's.
pub fn draw(frame: &mut Frame<'_>, url: &str, history: &History) {
    let mut rows = Rows { frame, top: 0 };
    match (history.last(), history.fault()) {
        (Some(sample), fault) => {
            rows.line(Line::from(facts::title(sample)).bold());
            rows.line(status(url, fault));
            rows.gap();
            figures(&mut rows, sample, history);
        }
        (None, fault) => {
            rows.line(Line::from("tandem top").bold());
            rows.line(match fault {
                Some(_) => status(url, fault),
                None => Line::from(format!("{url} · connecting")),
            });
        }
    }
    let area = rows.frame.area();
    let last = Rect { y: area.bottom().saturating_sub(1), height: area.height.min(1), ..area };
    if rows.top < area.height {
        rows.frame.render_widget(Line::from("q leaves").fg(Color::DarkGray), last);
    }
}

fn status(url: &str, fault: Option<&str>) -> Line<'static> {
    match fault {
        None => Line::from(url.to_owned()).fg(Color::DarkGray),
        Some(fault) => Line::from(format!("{url} · unreachable, retrying: {fault}")).fg(Color::Red),
    }
}

fn figures(rows: &mut Rows<'_, '_>, sample: &Sample, history: &History) {
    let rates = history.rates();
    rows.fact(facts::requests(sample));
    rows.fact(facts::blocks(sample));
    let stats = &sample.stats;
    let parts = [(stats.used_blocks, USED), (stats.cached_blocks, CACHED)];
    rows.bar(&parts, stats.total_blocks, String::new());
    rows.gap();
    rows.fact(facts::tokens(sample, rates));
    rows.sparkline(&history.speeds());
    rows.gap();
    rows.fact(facts::drafts(sample, rates));
    for (place, share) in (1..).zip(sample.accepted_shares()) {
        let percent = (100.0 * share).round() as u32;
        rows.bar(&[(percent, USED)], 100, format!(" {percent:>3} % at position {place}"));
    }
    rows.gap();
    rows.fact(facts::steps(sample));
    rows.fact(facts::prefixes(sample));
    for fact in facts::indexer(sample) {
        rows.fact(fact);
    }
}

/// Fills a screen from its top on; what does not fit is left out.
struct Rows<'a, 'b> {
    frame: &'a mut Frame<'b>,
    top: u16,
}

impl Rows<'_, '_> {
    /// The next `height` rows, if they are there.
    fn next(&mut self, height: u16) -> Option<Rect> {
        let area = self.frame.area();
        let y = area.y + self.top;
        self.top = self.top.saturating_add(height);
        (self.top <= area.height).then_some(Rect { y, height, ..area })
    }

    fn gap(&mut self) {
        self.top = self.top.saturating_add(1);
    }

    fn line(&mut self, line: Line<'_>) {
        if let Some(row) = self.next(1) {
            self.frame.render_widget(line, row);
        }
    }

    fn fact(&mut self, (label, text): Fact) {
        let label = Span::from(format!("{label:<width$}", width = usize::from(LABEL))).bold();
        self.line(Line::from(vec![label, Span::from(text)]));
    }

    /// A bar of the parts of a whole, with something said behind it.
    fn bar(&mut self, parts: &[(u32, Style)], whole: u32, behind: String) {
        let width = f64::from(self.bar_width());
        let columns = |part: u32| (f64::from(part) / f64::from(whole.max(1)) * width).round();
        let (mut spans, mut sum, mut filled) = (vec![Span::from(" ".repeat(LABEL.into()))], 0, 0);
        for (part, style) in parts {
            sum += part;
            // From the sum, so that the parts of a full bar fill it.
            let end = columns(sum) as usize;
            spans.push(Span::styled("█".repeat(end - filled), *style));
            filled = end;
        }
        let rest = usize::from(self.bar_width()).saturating_sub(filled);
        spans.extend([Span::styled("░".repeat(rest), FREE), Span::from(behind)]);
        self.line(Line::from(spans));
    }

    fn bar_width(&self) -> u16 {
        self.frame.area().width.saturating_sub(LABEL).min(BAR)
    }

    /// Speeds over time, the newest one at the right.
    fn sparkline(&mut self, speeds: &[u64]) {
        let width = self.bar_width();
        let Some(rows) = self.next(3) else { return };
        let [_, area] = rows.layout(&Layout::horizontal([LABEL, width].map(Constraint::Length)));
        let speeds = Sparkline::default().data(speeds).direction(RenderDirection::RightToLeft);
        self.frame.render_widget(speeds.style(USED), area);
    }
}
