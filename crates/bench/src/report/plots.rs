//! Plots as inline SVG whose colours are those of the page: each is a variable of its style.

use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

use super::{ReportError, number};

/// Size in units of the drawing, small enough that its text can be read on a phone.
const SIZE: (u32, u32) = (400, 250);
/// Colours of servers that the page has; more servers share them.
const N_COLOURS: usize = 8;
/// Stand for colours of the page; no other colours are drawn.
const INK: RGBColor = RGBColor(1, 0, 0);
const GRID: RGBColor = RGBColor(2, 0, 0);
const FIRST: u8 = 16;

/// A plot of lines or of bars, from 0 on.
#[derive(Default)]
pub(super) struct Plot {
    pub(super) x_label: &'static str,
    pub(super) y_label: &'static str,
    pub(super) lines: Vec<Line>,
    pub(super) bars: Vec<Bars>,
    /// Where the axes end; where the data does if unset.
    pub(super) x_max: Option<f64>,
    pub(super) y_max: Option<f64>,
}

/// A line of a server.
pub(super) struct Line {
    pub(super) server: usize,
    pub(super) points: Vec<(f64, f64)>,
    /// What each point is; none for a line without marks.
    pub(super) labels: Vec<String>,
}

/// Bars of a server over 1, 2, and so on.
pub(super) struct Bars {
    pub(super) server: usize,
    pub(super) heights: Vec<f64>,
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

impl Plot {
    /// Whether there is anything to draw.
    pub(super) fn is_empty(&self) -> bool {
        self.lines.iter().all(|line| line.points.is_empty())
            && self.bars.iter().all(|bars| bars.heights.is_empty())
    }

    /// The drawing.
    pub(super) fn svg(&self) -> Result<String, ReportError> {
        let mut svg = String::new();
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        self.draw(&area).map_err(|error| ReportError::Plot(error.to_string()))?;
        drop(area);
        Ok(with_page_colours(&svg))
    }

    fn draw(&self, area: &Area<'_>) -> Result<(), Box<dyn std::error::Error>> {
        let n_bars = self.bars.iter().map(|bars| bars.heights.len()).max().unwrap_or_default();
        let (x_range, y_range) = (self.x_range(n_bars), 0.0..self.y_max());
        let mut chart = ChartBuilder::on(area)
            .margin_top(22)
            .margin_right(20)
            .x_label_area_size(42)
            .y_label_area_size(52)
            .build_cartesian_2d(x_range, y_range)?;
        let text = |size| ("sans-serif", size).into_font().color(&INK);
        // Between positions there is none to name.
        let x_name = |x: &f64| {
            if n_bars > 0 && (x.fract() != 0.0 || *x < 1.0) { String::new() } else { tick(*x) }
        };
        chart
            .configure_mesh()
            .disable_x_mesh()
            .bold_line_style(GRID)
            .light_line_style(TRANSPARENT)
            .axis_style(INK)
            .label_style(text(15))
            .axis_desc_style(text(15))
            .x_labels(if n_bars > 0 { n_bars + 2 } else { 6 })
            .y_labels(6)
            .x_label_formatter(&x_name)
            .y_label_formatter(&|y| tick(*y))
            .x_desc(self.x_label)
            .draw()?;
        let above = text(15).pos(plotters::style::text_anchor::Pos::new(
            plotters::style::text_anchor::HPos::Left,
            plotters::style::text_anchor::VPos::Top,
        ));
        area.draw(&Text::new(self.y_label, (4, 1), above))?;
        self.draw_lines(&mut chart)?;
        self.draw_bars(&mut chart)
    }

    fn draw_lines(&self, chart: &mut Chart<'_, '_>) -> Result<(), Box<dyn std::error::Error>> {
        let x_max = self.x_max.unwrap_or(f64::INFINITY);
        // Many lines are told apart better when they are thin.
        let width = if self.lines.len() > 4 { 1 } else { 2 };
        for line in &self.lines {
            let ink = colour(line.server);
            let points = line.points.iter().copied().filter(|(x, _)| *x <= x_max);
            chart.draw_series(LineSeries::new(points, ink.stroke_width(width)))?;
            for (point, label) in line.points.iter().zip(&line.labels) {
                chart.draw_series([Circle::new(*point, 3, ink.filled())])?;
                let style = ("sans-serif", 14).into_font().color(&INK);
                let mark = EmptyElement::at(*point) + Text::new(label.clone(), (6, 2), style);
                chart.draw_series([mark])?;
            }
        }
        Ok(())
    }

    #[expect(clippy::cast_precision_loss, reason = "few bars")]
    fn draw_bars(&self, chart: &mut Chart<'_, '_>) -> Result<(), Box<dyn std::error::Error>> {
        let width = 0.8 / self.bars.len().max(1) as f64;
        for (idx, bars) in self.bars.iter().enumerate() {
            let rectangle = |(position, height): (usize, &f64)| {
                let left = position as f64 + 0.6 + idx as f64 * width;
                let corners = [(left, 0.0), (left + width * 0.94, *height)];
                Rectangle::new(corners, colour(bars.server).filled())
            };
            chart.draw_series(bars.heights.iter().enumerate().map(rectangle))?;
        }
        Ok(())
    }

    #[expect(clippy::cast_precision_loss, reason = "few bars")]
    fn x_range(&self, n_bars: usize) -> std::ops::Range<f64> {
        if n_bars > 0 {
            return 0.4..n_bars as f64 + 0.6;
        }
        let greatest = greatest(self.lines.iter().flat_map(|line| &line.points).map(|at| at.0));
        0.0..self.x_max.unwrap_or(greatest * 1.08)
    }

    fn y_max(&self) -> f64 {
        let of_lines = self.lines.iter().flat_map(|line| &line.points).map(|at| at.1);
        let of_bars = self.bars.iter().flat_map(|bars| &bars.heights).copied();
        self.y_max.unwrap_or(greatest(of_lines.chain(of_bars)) * 1.08)
    }
}

/// The greatest of some numbers; 1 where that leaves no room for an axis.
fn greatest(values: impl Iterator<Item = f64>) -> f64 {
    let greatest = values.fold(0.0, f64::max);
    if greatest > 0.0 && greatest.is_finite() { greatest } else { 1.0 }
}

/// A number beside an axis.
fn tick(value: f64) -> String {
    let text = number(value);
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text
    }
}

#[expect(clippy::cast_possible_truncation, reason = "below the number of colours")]
fn colour(server: usize) -> RGBColor {
    RGBColor(FIRST + (server % N_COLOURS) as u8, 0, 0)
}

/// The drawing with variables of the page for the colours that stand for them.
fn with_page_colours(svg: &str) -> String {
    let hex = |RGBColor(r, g, b): RGBColor| format!("\"#{r:02X}{g:02X}{b:02X}\"");
    let mut svg = svg.replace(&hex(INK), "\"currentColor\"").replace(&hex(GRID), "\"var(--grid)\"");
    for server in 0..N_COLOURS {
        svg = svg.replace(&hex(colour(server)), &format!("\"var(--s{server})\""));
    }
    svg
}
