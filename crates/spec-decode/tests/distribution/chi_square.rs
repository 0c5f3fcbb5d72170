//! Pearson's chi-square tests.

/// Cells of which less than this is expected are counted together.
const LEAST_EXPECTED: f64 = 10.0;

/// The probability that counts from the distribution behind `expected` differ from it at least as
/// much as `observed` do.
pub(crate) fn fit(observed: &[u32], expected: &[f64]) -> f64 {
    let pairs = observed.iter().zip(expected).map(|(&observed, &expected)| {
        assert!(observed == 0 || expected > 0.0, "{observed} of what must not be");
        [f64::from(observed), expected]
    });
    let cells = merged(pairs, |[_, expected]| expected);
    p_value(cells.iter().map(|[o, e]| (o - e).powi(2) / e))
}

/// The probability that two sets of counts from one distribution differ at least as much as `a` and
/// `b` do.
pub(crate) fn two_samples(a: &[u32], b: &[u32]) -> f64 {
    let total = |counts: &[u32]| counts.iter().map(|&n| f64::from(n)).sum::<f64>();
    let ratio = (total(b) / total(a)).sqrt();
    let pairs = a.iter().zip(b).map(|(&a, &b)| [f64::from(a), f64::from(b)]);
    let cells = merged(pairs, |[a, b]| (a + b) / 2.0);
    p_value(cells.iter().map(|[a, b]| (a * ratio - b / ratio).powi(2) / (a + b)))
}

fn merged(
    pairs: impl Iterator<Item = [f64; 2]>,
    expected: impl Fn([f64; 2]) -> f64,
) -> Vec<[f64; 2]> {
    let (mut cells, small): (Vec<_>, Vec<_>) =
        pairs.partition(|&pair| expected(pair) >= LEAST_EXPECTED);
    let rest = small.iter().fold([0.0; 2], |sum, pair| [sum[0] + pair[0], sum[1] + pair[1]]);
    if expected(rest) >= LEAST_EXPECTED {
        cells.push(rest);
    }
    cells
}

/// The upper tail of the sum of `terms`, with one degree of freedom fewer than there are.
fn p_value(terms: impl ExactSizeIterator<Item = f64>) -> f64 {
    let n_cells = terms.len();
    assert!(n_cells >= 2, "there is something to compare");
    upper_gamma((n_cells - 1) as f64 / 2.0, terms.sum::<f64>() / 2.0)
}

/// The regularised upper incomplete gamma function Q(a, x): by the series of its complement below
/// the mean, by the continued fraction (Lentz) above it.
fn upper_gamma(a: f64, x: f64) -> f64 {
    if x <= 0.0 {
        return 1.0;
    }
    let scale = (a * x.ln() - x - ln_gamma(a)).exp();
    if x < a + 1.0 {
        let (mut term, mut sum, mut n) = (1.0 / a, 1.0 / a, a);
        while term > sum * 1e-15 {
            n += 1.0;
            term *= x / n;
            sum += term;
        }
        return 1.0 - scale * sum;
    }
    let mut b = x + 1.0 - a;
    let (mut c, mut d) = (f64::MAX, 1.0 / b);
    let mut fraction = d;
    for i in 1..100_000 {
        let i = f64::from(i);
        let factor = i * (a - i);
        b += 2.0;
        d = 1.0 / (factor * d + b);
        c = b + factor / c;
        fraction *= c * d;
        if (c * d - 1.0).abs() < 1e-15 {
            break;
        }
    }
    scale * fraction
}

/// Stirling's series, after raising `x` until it is exact to 1e-12.
fn ln_gamma(mut x: f64) -> f64 {
    let mut shift = 0.0;
    while x < 15.0 {
        shift += x.ln();
        x += 1.0;
    }
    let inverse = 1.0 / (x * x);
    let series = (1.0 / 12.0 - inverse * (1.0 / 360.0 - inverse / 1260.0)) / x;
    (x - 0.5) * x.ln() - x + 0.5 * (2.0 * std::f64::consts::PI).ln() + series - shift
}

/// Percentiles from printed tables.
#[test]
fn tails_are_those_of_the_tables() {
    let tables = [(3.841, 1.0, 0.05), (6.635, 1.0, 0.01), (18.307, 10.0, 0.05), (2.706, 1.0, 0.10)];
    let tables = tables.into_iter().chain([(149.449, 100.0, 0.001), (3.940, 10.0, 0.95)]);
    for (statistic, freedom, tail) in tables {
        let got = upper_gamma(freedom / 2.0, statistic / 2.0);
        assert!((got - tail).abs() < 2e-4 * f64::max(1.0, tail / 0.1), "{got}, not {tail}");
    }
}
