//! A target under libFuzzer, where this is built for it; else the seeds of a target as files.
//!
//! `cargo xtask fuzz` builds and runs both.
#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    use std::panic;
    use std::sync::{Mutex, OnceLock};

    static TARGET: OnceLock<&fuzz::Target> = OnceLock::new();
    static PANIC: Mutex<String> = Mutex::new(String::new());
    let target = TARGET.get_or_init(|| {
        // Not every panic is a finding: readers catch those of libraries that have them.
        panic::set_hook(Box::new(|info| {
            *PANIC.lock().expect("nothing panics in here") = info.to_string();
        }));
        let name = std::env::var("TANDEM_FUZZ_TARGET").expect("xtask names the target");
        fuzz::target(&name).expect("xtask names one of the targets")
    });
    if panic::catch_unwind(|| (target.run)(input)).is_err() {
        eprintln!("{}", PANIC.lock().expect("nothing panics in here"));
        std::process::abort();
    }
});

#[cfg(not(fuzzing))]
fn main() -> std::io::Result<()> {
    use std::io::{Error, ErrorKind};
    use std::path::Path;

    let args: Vec<String> = std::env::args().skip(1).collect();
    let [name, folder] = &args[..] else {
        return Err(Error::new(ErrorKind::InvalidInput, "fuzz takes TARGET and FOLDER"));
    };
    let Some(target) = fuzz::target(name) else {
        let names: Vec<&str> = fuzz::TARGETS.iter().map(|target| target.name).collect();
        let reason = format!("there is no target `{name}`; use one of {}", names.join(", "));
        return Err(Error::new(ErrorKind::InvalidInput, reason));
    };
    std::fs::create_dir_all(folder)?;
    for (idx, seed) in target.seeds().iter().enumerate() {
        std::fs::write(Path::new(folder).join(format!("seed-{idx}")), seed)?;
    }
    Ok(())
}
