//! A strict reader of what Prometheus scrapes: it takes what the formats say, and nothing else.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use admin_http::Format;

/// All series by name and labels, as they are written, and the names of the families.
#[derive(Debug, Default)]
pub(crate) struct Exposition {
    pub(crate) series: BTreeMap<String, f64>,
    pub(crate) families: BTreeSet<String>,
}

/// A metric and its series, in the order of the text.
struct Family {
    name: String,
    kind: String,
    samples: Vec<(String, String, f64)>,
}

impl Exposition {
    /// Reads a text that must have no fault.
    pub(crate) fn read(text: &str, format: Format) -> Self {
        let text = match format {
            Format::OpenMetrics => text.strip_suffix("# EOF\n").expect("it ends with EOF"),
            Format::Prometheus => text,
        };
        assert!(text.ends_with('\n') && !text.contains("# EOF"), "{text}");
        let mut families: Vec<Family> = vec![];
        let mut lines = text.lines();
        while let Some(line) = lines.next() {
            if let Some(help) = line.strip_prefix("# HELP ") {
                let (name, help) = help.split_once(' ').expect("a help text");
                assert!(help.trim() == help && help.len() > 10 && help.ends_with('.'), "{line}");
                let kind = lines.next().and_then(|line| line.strip_prefix("# TYPE "));
                let kind = kind.and_then(|kind| kind.strip_prefix(name)).expect("its type follows");
                let (name, kind) = (name.to_owned(), kind.trim_start().to_owned());
                families.push(Family { name, kind, samples: vec![] });
            } else {
                let family = families.last_mut().expect("a family before its samples");
                family.samples.push(sample(line));
            }
        }
        let mut all = Self::default();
        for family in families {
            family.check(format);
            assert!(all.families.insert(family.name), "a family twice");
            for (name, labels, value) in family.samples {
                let series = format!("{name}{labels}");
                assert!(all.series.insert(series.clone(), value).is_none(), "{series} twice");
            }
        }
        all
    }

    /// The value of a series.
    pub(crate) fn get(&self, series: &str) -> f64 {
        *self.series.get(series).unwrap_or_else(|| panic!("no {series} in {self:#?}"))
    }

    /// The names of all series, without labels.
    pub(crate) fn names(&self) -> HashSet<&str> {
        self.series.keys().map(|series| series.split('{').next().unwrap()).collect()
    }
}

/// Name, labels with their braces, and value of a line.
fn sample(line: &str) -> (String, String, f64) {
    let (series, value) = line.rsplit_once(' ').expect("a value");
    let (name, labels) = series.split_at(series.find('{').unwrap_or(series.len()));
    let is_letter = |c: char| c.is_ascii_alphabetic() || "_:".contains(c);
    assert!(name.starts_with(is_letter), "{line}");
    assert!(name.chars().all(|c| is_letter(c) || c.is_ascii_digit()), "{line}");
    if !labels.is_empty() {
        let inner = labels.strip_prefix('{').and_then(|labels| labels.strip_suffix('}'));
        for label in inner.expect("braces").split(',') {
            let (key, value) = label.split_once('=').expect("key and value");
            assert!(key.chars().all(|c| c.is_ascii_alphanumeric() || c == '_'), "{line}");
            assert!(value.len() >= 2 && value.starts_with('"') && value.ends_with('"'), "{line}");
        }
    }
    (name.to_owned(), labels.to_owned(), value.parse().expect("a number"))
}

impl Family {
    fn check(&self, format: Format) {
        let Self { name, kind, samples } = self;
        match kind.as_str() {
            "counter" => {
                let is_open = format == Format::OpenMetrics;
                let total = if is_open { format!("{name}_total") } else { name.clone() };
                assert!(total.ends_with("_total") && !total.ends_with("_total_total"), "{name}");
                for (name, _, value) in samples {
                    assert!(*name == total && *value >= 0.0, "{name}");
                }
            }
            "gauge" => {
                let reserved = ["_total", "_count", "_sum", "_bucket"];
                assert!(!reserved.iter().any(|suffix| name.ends_with(suffix)), "{name}");
                assert!(samples.iter().all(|sample| sample.0 == *name), "{name}");
            }
            "histogram" => self.check_histogram(),
            other => panic!("{name} is a {other}"),
        }
    }

    /// Buckets rise to all, beside one count and one sum.
    fn check_histogram(&self) {
        let Self { name, samples, .. } = self;
        let of = |suffix: &str| -> Vec<&(String, String, f64)> {
            samples.iter().filter(|sample| sample.0 == format!("{name}{suffix}")).collect()
        };
        let (buckets, counts, sums) = (of("_bucket"), of("_count"), of("_sum"));
        assert_eq!((counts.len(), sums.len()), (1, 1), "{name}");
        assert_eq!(buckets.len() + 2, samples.len(), "{name}");
        let mut last = (f64::NEG_INFINITY, 0.0);
        for (_, labels, n) in buckets {
            let bound = labels.split_once("le=\"").expect("a bound").1.split('"').next().unwrap();
            let bound: f64 = bound.parse().expect("a number");
            assert!(bound > last.0 && *n >= last.1, "{name}: {labels}");
            last = (bound, *n);
        }
        assert_eq!(last, (f64::INFINITY, counts[0].2), "{name}");
    }
}
