//! Signals end a benchmark: what was measured stays, what was started does not.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::{Place, known};

/// How long a machine under load may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// A benchmark that is killed if a test fails before its end.
struct Bench(Child);

impl Drop for Bench {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Bench {
    fn signal(&self, name: &str) {
        let pid = self.0.id().to_string();
        assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
    }

    fn exit_code(&mut self) -> Option<i32> {
        let ended = wait_for("the end", || self.0.try_wait().unwrap());
        ended.code()
    }
}

fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(started.elapsed() < PATIENCE, "{what} does not come");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn is_alive(pid: &str) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
    // One that has ended and that nobody has waited for yet is not alive.
    stat.is_ok_and(|stat| !stat.rsplit(')').next().unwrap().trim_start().starts_with('Z'))
}

#[test]
fn what_was_measured_is_kept_and_called_partial() {
    let place = Place::new();
    let args = "serve --start=--model=tiny-dsv3 --num-prompts 20000 --random-input-len 8 \
                --random-output-len 64 --num-warmups 1";
    let mut command = place.command(&args.split_whitespace().collect::<Vec<_>>());
    let mut bench = Bench(command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap());
    let mut lines = BufReader::new(bench.0.stderr.take().unwrap()).lines();
    let progress = lines.find(|line| line.as_ref().unwrap().contains("tokens/s")).unwrap();
    assert!(progress.unwrap().contains("left in all"));
    bench.signal("-INT");
    let rest: Vec<String> = lines.map(Result::unwrap).collect();
    assert!(rest.iter().any(|line| line.starts_with("stopping")), "{rest:?}");
    assert_eq!(bench.exit_code(), Some(130));
    let result = place.result();
    assert_eq!(
        (&result["is_partial"], &result["runs"][0]["is_partial"]),
        (&true.into(), &true.into())
    );
    assert!(result["title"].as_str().unwrap().contains("partial"));
    let metrics = &result["runs"][0]["metrics"];
    let n_completed = metrics["n_completed"].as_u64().unwrap();
    assert!(n_completed > 0 && n_completed < 20_000, "{metrics}");
    let pid = known(&result["provenance"]["servers"][0], "process")["pid"].to_string();
    assert!(!is_alive(&pid), "the server is stopped");
}

/// A program that never listens, and says who it is in a file.
fn mute(place: &Place) -> String {
    let pid = place.folder.path().join("pid");
    let script = format!(
        r#"#!/bin/sh
case "$*" in
*--print-config*) echo '[engine]'; echo 'model = "tiny-dsv3"' ;;
*) echo $$ > {0}.part; mv {0}.part {0}; exec sleep 600 ;;
esac
"#,
        pid.display()
    );
    place.program("mute", &script)
}

#[test]
fn a_server_that_still_starts_is_stopped_and_there_is_no_result() {
    let place = Place::new();
    let program = mute(&place);
    let mut command = place.command(&["serve", "--start=", "--tandem", &program]);
    let mut bench = Bench(command.stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap());
    let file = place.folder.path().join("pid");
    let pid = wait_for("the server", || fs::read_to_string(&file).ok());
    bench.signal("-TERM");
    assert_eq!(bench.exit_code(), Some(130));
    wait_for("the server's end", || (!is_alive(pid.trim())).then_some(()));
    assert!(!place.file().exists());
}
