//! Loads of machines that are written down, and of this one.

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::process::Command;

use super::*;

/// A `/proc` of two processors, with the ticks so far of: idle, the server, its child, this
/// program, another.
fn kernel(folder: &tempfile::TempDir, ticks: [u64; 5]) -> Kernel {
    let write = |name: String, text: String| {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    let [idle, server, child, own, other] = ticks;
    let busy = server + child + own + other;
    write("stat".into(), format!("cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1\ncpu1 1\nbtime 1\n"));
    write("loadavg".into(), "2.50 1.0 1.0 1/2 3\n".into());
    write("cpuinfo".into(), "cpu MHz\t: 2000.0\ncpu MHz\t: 3000.0\n".into());
    let process = |pid: u32, parent: u32, name: &str, ticks: u64| {
        let zeros = "0 ".repeat(9);
        write(
            format!("{pid}/stat"),
            format!("{pid} ({name}) S {parent} {zeros}{ticks} 0 0 0 20 0 1 0 7\n"),
        );
    };
    process(4_000_001, 1, "tandem", server);
    process(4_000_002, 4_000_001, "worker", child);
    process(std::process::id(), 1, "bench", own);
    process(4_000_003, 1, "a) (b", other);
    Kernel { proc: folder.path().to_owned(), sys: folder.path().to_owned() }
}

const SERVER: ServerProcess = ServerProcess::Local(4_000_001);

/// The window between two looks.
fn window(server: ServerProcess, from: [u64; 5], to: [u64; 5]) -> LoadWindow {
    let folder = tempfile::tempdir().unwrap();
    let mut tally = Tally::new(kernel(&folder, from).scan());
    tally.add(&kernel(&folder, to).scan().unwrap(), server);
    tally.window()
}

#[test]
fn work_is_shared_out_to_who_did_it() {
    let window = window(SERVER, [1000, 10, 20, 30, 40], [1040, 30, 40, 40, 50]);
    let shares = (window.busy, window.server, window.generator, window.others);
    assert_eq!(shares, (0.6, 0.4, 0.1, 0.1));
    assert_eq!(window.busiest, [("a) (b".to_owned(), 0.1)]);
    assert_eq!(window.load_average, 2.5);
    assert_eq!(window.mhz.unwrap().mean, 2500.0);
    assert_eq!(window.others_by_sample.unwrap().max, 0.1);
}

#[test]
fn a_machine_is_quiet_up_to_a_twentieth() {
    let lasting = |seconds, others: u64, server| {
        let window = window(server, [1, 0, 0, 0, 0], [901 - others, 80, 0, 20, others]);
        LoadWindow { seconds, ..window }
    };
    let judge_of =
        |server, others| judge(server, 2, &LoadWindow::default(), &lasting(9.0, others, server));
    assert_eq!(judge_of(SERVER, 50), (Some(true), None));
    let (is_quiet, why) = judge_of(SERVER, 60);
    assert_eq!(is_quiet, Some(false));
    assert_eq!(why.unwrap(), "others used 6 % of all processors during the run: a) (b 6 %");
    // Where the server's process is not known its work looks like that of others.
    assert_eq!(judge_of(ServerProcess::Unknown, 0).0, None);
    assert_eq!(judge_of(ServerProcess::Elsewhere, 0).0, Some(false));
    let before =
        |seconds| judge(SERVER, 2, &lasting(seconds, 60, SERVER), &lasting(9.0, 0, SERVER)).1;
    assert!(before(2.0).unwrap().contains("before the run"));
    assert_eq!(before(0.5), None, "too short to say anything");
    let short = judge(SERVER, 2, &LoadWindow::default(), &lasting(0.5, 60, SERVER));
    assert_eq!(short, (None, Some("a run of 0.5 s is too short to tell".to_owned())));
    let (is_quiet, why) = judge(SERVER, 0, &LoadWindow::default(), &LoadWindow::default());
    assert!(is_quiet.is_none() && why.unwrap().contains("does not tell"));
}

#[test]
fn a_processor_that_is_held_for_a_while_is_told_however_many_there_are() {
    // Half seconds of a run on two processors, in the first of which another program has one whole.
    let of_run = |n_held: u64, n_samples: u64| {
        let folder = tempfile::tempdir().unwrap();
        let at = |sample: u64| {
            let held = 50 * sample.min(n_held);
            kernel(&folder, [1000 + 60 * sample - held, 40 * sample, 0, 0, held]).scan().unwrap()
        };
        let mut tally = Tally::new(Some(at(0)));
        (1..=n_samples).for_each(|sample| tally.add(&at(sample), SERVER));
        #[expect(clippy::cast_precision_loss, reason = "few samples")]
        let seconds = n_samples as f64 / 2.0;
        LoadWindow { seconds, ..tally.window() }
    };
    let judged = |window: &LoadWindow| judge(SERVER, 2, &LoadWindow::default(), window);
    let window = of_run(5, 60);
    assert_eq!((window.held_s, window.others), (2.5, 250.0 / 6000.0), "less than a twentieth");
    let (is_quiet, why) = judged(&window);
    assert_eq!(is_quiet, Some(false));
    assert_eq!(
        why.unwrap(),
        "others used 4 % of all processors during the run, and half a processor or more for 2.5 s \
         of it: a) (b 4 %"
    );
    // Half a second is not long, and neither are two seconds of many.
    assert_eq!(judged(&of_run(1, 60)), (Some(true), None));
    assert_eq!(judged(&of_run(4, 220)), (Some(true), None));
    assert_eq!(judged(&of_run(4, 200)).0, Some(false));
    // On a machine of 64 it is one in a hundred.
    let large = LoadWindow { others: 0.01, held_s: 30.0, seconds: 60.0, ..LoadWindow::default() };
    assert_eq!(judge(SERVER, 64, &LoadWindow::default(), &large).0, Some(false));
}

#[test]
fn a_generator_that_is_late_or_busy_is_told() {
    let record = |lag| crate::Record {
        index: 0,
        due: Duration::ZERO,
        sent: Duration::from_millis(lag),
        messages: vec![],
        ended: Duration::from_secs(1),
        outcome: crate::Outcome::Completed,
        n_prompt: 1,
        n_planned: None,
        counted: crate::Counted::Ids,
    };
    let of = |share: f64, lag, tick_lag| {
        let during = LoadWindow { generator: share, ..LoadWindow::default() };
        let machine = MachineLoad {
            n_cpus: 4,
            governor: None,
            before: LoadWindow::default(),
            during,
            is_quiet: Some(true),
            why_not: None,
        };
        let metrics = Metrics::of(&[record(lag)], &crate::Slo::default());
        assert_eq!(GeneratorLoad::of(&machine, ServerProcess::InProcess, &metrics, None), None);
        GeneratorLoad::of(&machine, SERVER, &metrics, tick_lag).unwrap()
    };
    assert!(!of(0.19, 10, Some(10.0)).is_bottleneck);
    assert_eq!(of(0.25, 0, None).why.unwrap(), "it used 100 % of a processor");
    assert!(of(0.1, 11, None).why.unwrap().contains("11.0 ms late"));
    assert!(of(0.1, 0, Some(10.5)).why.unwrap().contains("woke up 10.5 ms late"));
}

#[test]
fn a_busy_neighbour_is_seen_on_this_machine() {
    let mut neighbour = Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
    let watching = Instant::now();
    let monitor = Monitor::start(ServerProcess::Elsewhere);
    monitor.begin();
    // Until the kernel has counted a second's ticks, however little of a processor it gets.
    let began = Instant::now();
    let ticks = || {
        let stat = fs::read_to_string(format!("/proc/{}/stat", neighbour.id())).unwrap();
        stat.split(' ').nth(13).unwrap().parse::<u64>().unwrap()
    };
    let n_before = ticks();
    while ticks() < n_before + 100 && began.elapsed() < Duration::from_secs(30) {
        std::thread::sleep(Duration::from_millis(50));
    }
    let load = monitor.finish();
    neighbour.kill().unwrap();
    neighbour.wait().unwrap();
    // The monitor may have begun a little later than the count.
    let others_s = load.during.others * load.during.seconds * f64::from(load.n_cpus);
    assert!(others_s > 0.5 && load.during.busy <= 1.0, "{load:?}");
    // Each of the two times is counted by itself.
    let watched_s = load.before.seconds + load.during.seconds;
    assert!(watched_s <= watching.elapsed().as_secs_f64(), "{load:?}");
}

#[test]
fn the_process_behind_an_address_is_found() {
    for local in ["127.0.0.1:0", "[::1]:0", "0.0.0.0:0"] {
        let listener = TcpListener::bind(local).unwrap();
        let port = listener.local_addr().unwrap().port();
        let ip = if local.starts_with('[') { "::1" } else { "127.0.0.1" };
        let address = SocketAddr::new(ip.parse().unwrap(), port);
        let found = ServerProcess::listening_on(address);
        assert_eq!(found, ServerProcess::Local(std::process::id()), "{local}");
        // Nobody hears what is sent to another machine.
        let documentation = SocketAddr::from(([192, 0, 2, 1], port));
        assert_eq!(ServerProcess::listening_on(documentation), ServerProcess::Elsewhere);
    }
    let nobody = SocketAddr::from(([127, 0, 0, 1], 1));
    assert_eq!(ServerProcess::listening_on(nobody), ServerProcess::Unknown);
}

#[test]
fn a_listener_on_the_address_goes_before_one_on_all() {
    let listeners = [("0.0.0.0:80", "all"), ("10.1.2.3:80", "one"), ("10.1.2.3:81", "other port")];
    let listeners = listeners.map(|(at, inode)| (at.parse().unwrap(), inode.to_owned()));
    let heard_by = |address: &str, is_here| {
        server::heard_by(&listeners, address.parse().unwrap(), is_here).concat()
    };
    assert_eq!(heard_by("10.1.2.3:80", true), "socket:[one]");
    assert_eq!(heard_by("10.1.2.4:80", true), "socket:[all]");
    assert_eq!(heard_by("10.1.2.4:80", false), "");
    assert_eq!(heard_by("[::1]:80", true), "", "one of all IPv4 addresses hears no IPv6");
}
