//! Recorded estimates, and what is said of them.

use super::document::read_benches;
use super::*;

/// What criterion wrote of `step/16 requests`, with every time `times` as long.
fn record(criterion: &Path, id: &str, times: f64) {
    let folder = criterion.join(id.replace(' ', "_")).join("new");
    fs::create_dir_all(&folder).unwrap();
    let benchmark = format!(
        r#"{{"group_id":"step","function_id":null,"value_str":null,"throughput":null,
        "full_id":"{id}","directory_name":"step_16","title":"{id}"}}"#
    );
    let (mean, low, high, median) =
        (1066.2 * times, 1061.8 * times, 1071.1 * times, 1064.0 * times);
    let estimates = format!(
        r#"{{"mean":{{"confidence_interval":{{"confidence_level":0.95,"lower_bound":{low},
        "upper_bound":{high}}},"point_estimate":{mean},"standard_error":2.3}},
        "median":{{"confidence_interval":{{"confidence_level":0.95,"lower_bound":1059.0,
        "upper_bound":1075.0}},"point_estimate":{median},"standard_error":2.8}},"slope":null}}"#
    );
    fs::write(folder.join("benchmark.json"), benchmark).unwrap();
    fs::write(folder.join("estimates.json"), estimates).unwrap();
}

fn document(times: &[(&str, f64)], others_share: f64) -> Document {
    let folder = tempfile::tempdir().unwrap();
    for (id, times) in times {
        record(folder.path(), id, *times);
    }
    let mut origin = origin(&[]).unwrap();
    origin["commit"] = "0123456789abcdef".into();
    origin["is_dirty"] = true.into();
    origin["cpu"] = "Some CPU".into();
    origin["n_cpus"] = 2.into();
    origin["others_share"] = others_share.into();
    Document { origin, benches: read_benches(folder.path()).unwrap() }
}

#[test]
fn a_table_has_ratios_and_says_what_is_noise() {
    let before = document(&[("a", 1.0), ("group/b", 1.0), ("c", 1.0), ("e", 1.0)], 0.0);
    let now = [("a", 1.004), ("group/b", 0.5), ("c", 2000.0), ("d", 2e6), ("e", 1.0092)];
    let now = document(&now, 0.31);
    let expected = "\
| bench   |       mean |         95 % interval |     median |   baseline |    ratio | finding |
|:--------|-----------:|----------------------:|-----------:|-----------:|---------:|--------:|
| a       |    1.07 µs |     1.07 µs – 1.08 µs |    1.07 µs |    1.07 µs |    1.004 |   noise |
| c       |    2.13 ms |     2.12 ms – 2.14 ms |    2.13 ms |    1.07 µs | 2000.000 |  slower |
| d       |     2.13 s |       2.12 s – 2.14 s |     2.13 s |          – |        – |     new |
| e       |    1.08 µs |     1.07 µs – 1.08 µs |    1.07 µs |    1.07 µs |    1.009 |   noise |
| group/b | 533.1 ns |   530.9 ns – 535.5 ns |   532.0 ns |    1.07 µs |    0.500 |  faster |

These: commit 0123456789ab, with changes, on 2 × Some CPU. The machine was not quiet: others used \
31 % of all processors.

The baseline: commit 0123456789ab, with changes, on 2 × Some CPU.
";
    let squeezed = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let text = now.markdown(Some(&before));
    let is_rule = |line: &&str| !line.starts_with("|:");
    let lines = |text: &str| text.lines().filter(is_rule).map(squeezed).collect::<Vec<_>>();
    assert_eq!(lines(&text), lines(expected));
    let widths = text.lines().filter(|line| line.starts_with('|')).map(|line| line.chars().count());
    assert!(widths.collect::<Vec<_>>().windows(2).all(|two| two[0] == two[1]), "{text}");
    let alone = now.markdown(None);
    assert!(!alone.contains("finding") && !alone.contains("The baseline"), "{alone}");
}

#[test]
fn other_machines_and_unknown_loads_are_told() {
    let now = document(&[("a", 1.0)], 0.0);
    let mut before = document(&[("a", 1.0)], 0.0);
    before.origin["cpu"] = "Another".into();
    before.origin["others_share"] = serde_json::Value::Null;
    let text = now.markdown(Some(&before));
    assert!(text.contains("Whether the machine was quiet is not known."), "{text}");
    assert!(text.ends_with("The processors differ: these ratios compare machines.\n"), "{text}");
}

#[test]
fn documents_read_back_and_others_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("micro/before.json");
    let document = document(&[("a", 1.0)], 0.25);
    document.write(&path).unwrap();
    assert_eq!(Document::read(&path).unwrap(), document);
    let text = fs::read_to_string(&path).unwrap();
    for (part, other) in [("tandem-micro/1", "tandem-micro/9"), ("median_ns", "median")] {
        assert!(text.contains(part));
        fs::write(&path, text.replace(part, other)).unwrap();
        assert!(Document::read(&path).is_err(), "{other}");
    }
    assert!(Document::read(folder.path()).is_err());
}

#[test]
fn others_are_those_who_are_neither_this_nor_its_children() {
    let at = |idle: u64, busy: u64, own: u64| {
        let machine = format!("cpu  {busy} 0 0 {idle} 0 0 0 0 9 9\ncpu0 1\n");
        let program = format!("7 (a) (b) S 1 {}{own} 0 0 0 20 0 1 0 7\n", "0 ".repeat(9));
        Load::parse(&machine, &program).unwrap()
    };
    assert_eq!(at(160, 140, 30).others_since(&at(100, 100, 10)), 0.2);
    assert_eq!(at(100, 100, 10).others_since(&at(100, 100, 10)), 0.0);
    assert_eq!(Load::parse("", ""), None);
}

fn parsed(args: &str) -> Result<Options> {
    parse(&args.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
}

#[test]
fn options_are_read_or_refused() {
    let options = parsed("step --control -p scheduler --save a-1 --baseline b --output c.json");
    let text = |text: &str| Some(text.to_owned());
    let expected = Options {
        filter: text("step"),
        is_control: true,
        package: text("scheduler"),
        save: text("a-1"),
        baseline: text("b"),
        output: Some("c.json".into()),
    };
    assert_eq!(options.unwrap(), expected);
    for wrong in ["--save", "--save ../x", "a b", "--quick", "--baseline a/b", "-p"] {
        assert!(parsed(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn benches_of_the_workspace_are_found() {
    let (members, _) = workspace::load().unwrap();
    let of = |options: &str| benches(&members, &parsed(options).unwrap());
    let control = of("--control").unwrap();
    assert!(!control.needs_libtorch && control.names.contains(&"step".to_owned()), "{control:?}");
    // Another kind of bench beside it.
    assert!(!control.names.contains(&"drafting".to_owned()));
    let all = of("").unwrap();
    assert!(all.needs_libtorch && all.packages.contains(&"kernels".to_owned()), "{all:?}");
    assert_eq!(of("-p scheduler").unwrap().packages, ["scheduler"]);
    assert!(of("-p engine-types").is_err());
}
