//! Plots as inline SVG whose colours are those of the page: each is a variable of its style.

use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

use super::{ReportError, number};

/// Size in units of the drawing, small enough that its text can be read on a phone.
const SIZE: (u32, u32) = (400, 250);
/// Room of the two axes.
const X_AXIS: i32 = 42;
const Y_AXIS: i32 = 52;
/// Height of the labels of points.
const LABEL_HEIGHT: i32 = 14;
/// Colours that the page has for servers and the like; more of them share these.
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

/// A line.
pub(super) struct Line {
    pub(super) colour: usize,
    pub(super) points: Vec<(f64, f64)>,
    /// What each point is; none for a line without marks.
    pub(super) labels: Vec<String>,
}

/// Bars over 1, 2, and so on.
pub(super) struct Bars {
    pub(super) colour: usize,
    pub(super) heights: Vec<f64>,
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

impl Plot {
    /// Whether there is anything to draw; a single point without a mark cannot be seen.
    pub(super) fn is_empty(&self) -> bool {
        self.lines.iter().all(|line| line.points.len() < 2 && line.labels.is_empty())
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
            .x_label_area_size(X_AXIS)
            .y_label_area_size(Y_AXIS)
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
        self.draw_labels(area, &chart)?;
        self.draw_bars(&mut chart)
    }

    fn draw_lines(&self, chart: &mut Chart<'_, '_>) -> Result<(), Box<dyn std::error::Error>> {
        let x_max = self.x_max.unwrap_or(f64::INFINITY);
        // Many lines are told apart better when they are thin.
        let width = if self.lines.len() > 4 { 1 } else { 2 };
        for line in &self.lines {
            let ink = colour(line.colour);
            let points = line.points.iter().copied().filter(|(x, _)| *x <= x_max);
            chart.draw_series(LineSeries::new(points, ink.stroke_width(width)))?;
            let marked = line.points.iter().take(line.labels.len());
            chart.draw_series(marked.map(|point| Circle::new(*point, 3, ink.filled())))?;
        }
        Ok(())
    }

    /// Labels beside their points, in the colours of their lines; none over a point, an axis or
    /// another label. One that has no room is left out.
    fn draw_labels(
        &self,
        area: &Area<'_>,
        chart: &Chart<'_, '_>,
    ) -> Result<(), Box<dyn std::error::Error>> {
        let on_page = |point: &(f64, f64)| chart.backend_coord(point);
        let labelled = || self.lines.iter().flat_map(|line| line.points.iter().zip(&line.labels));
        let point_box = |(x, y): (i32, i32)| Room { left: x - 4, top: y - 4, width: 8, height: 8 };
        let mut taken: Vec<Room> = labelled().map(|(point, _)| point_box(on_page(point))).collect();
        for line in &self.lines {
            let style = ("sans-serif", LABEL_HEIGHT).into_font().color(&colour(line.colour));
            for (point, label) in line.points.iter().zip(&line.labels) {
                if let Some(room) = room_beside(on_page(point), label, &taken) {
                    let text = Text::new(label.clone(), (room.left, room.top), style.clone());
                    area.draw(&text)?;
                    taken.push(room);
                }
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
                Rectangle::new(corners, colour(bars.colour).filled())
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

/// Room of a rectangle, in units of the drawing.
#[derive(Clone, Copy)]
struct Room {
    left: i32,
    top: i32,
    width: i32,
    height: i32,
}

impl Room {
    fn overlaps(&self, other: &Self) -> bool {
        self.left < other.left + other.width
            && other.left < self.left + self.width
            && self.top < other.top + other.height
            && other.top < self.top + self.height
    }
}

/// Free room for a label beside a point: a curve that rises to the right leaves most of it below on
/// the right and above on the left.
fn room_beside((x, y): (i32, i32), label: &str, taken: &[Room]) -> Option<Room> {
    let n_chars = i32::try_from(label.chars().count()).unwrap_or(i32::MAX / 16);
    let (width, height) = (n_chars * 8, LABEL_HEIGHT);
    let (right, left) = (x + 6, x - 6 - width);
    let (below, above) = (y + 2, y - 2 - height);
    let middle = (x - width / 2, y - height / 2);
    let corners = [
        (right, below),
        (left, above),
        (right, middle.1),
        (left, middle.1),
        (middle.0, y - 6 - height),
        (right, above),
        (middle.0, y + 6),
    ];
    let rooms = corners.map(|(left, top)| Room { left, top, width, height });
    rooms.into_iter().find(|room| {
        let (right, bottom) = (room.left + width, room.top + height);
        let [x_end, y_end] = [SIZE.0, SIZE.1].map(u32::cast_signed);
        let is_inside = room.left > Y_AXIS && right <= x_end && bottom < y_end - X_AXIS;
        is_inside && !taken.iter().any(|other| other.overlaps(room))
    })
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
fn colour(idx: usize) -> RGBColor {
    RGBColor(FIRST + (idx % N_COLOURS) as u8, 0, 0)
}

/// The drawing with variables of the page for the colours that stand for them.
fn with_page_colours(svg: &str) -> String {
    let hex = |RGBColor(r, g, b): RGBColor| format!("\"#{r:02X}{g:02X}{b:02X}\"");
    let mut svg = svg.replace(&hex(INK), "\"currentColor\"").replace(&hex(GRID), "\"var(--grid)\"");
    for idx in 0..N_COLOURS {
        svg = svg.replace(&hex(colour(idx)), &format!("\"var(--s{idx})\""));
    }
    svg
}
