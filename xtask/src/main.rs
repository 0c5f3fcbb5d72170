//! Project tasks, run as `cargo xtask <task>`. Builds without libtorch.
#![expect(clippy::print_stderr, clippy::print_stdout, reason = "a task reports to the terminal")]

mod bench;
mod ci;
mod codegen;
mod demo;
mod fuzz;
mod libtorch;
mod micro;
mod mutants;
mod process;
mod serve;
mod setup;
mod sim;
mod soak;
mod test;
mod tidy;
mod tools;
mod workspace;

use std::process::ExitCode;

use anyhow::{Result, bail};

/// A task: its name, its arguments, one line about it, its full help and what runs it.
struct Task {
    name: &'static str,
    usage: &'static str,
    about: &'static str,
    help: &'static str,
    run: fn(&[String]) -> Result<()>,
}

const TASKS: &[Task] = &[
    Task {
        name: "setup",
        usage: "[--device cpu|cuda|rocm|auto]",
        about: "Provide libtorch in .libtorch, or check your own",
        help: setup::HELP,
        run: setup::run,
    },
    Task {
        name: "demo",
        usage: "[PROMPT]",
        about: "Serve the bundled checkpoint and stream a completion",
        help: demo::HELP,
        run: demo::run,
    },
    Task {
        name: "serve",
        usage: "[ARGS...]",
        about: "Build and run `tandem serve` with these arguments",
        help: serve::HELP,
        run: serve::run,
    },
    Task {
        name: "bench",
        usage: "serve|ab|sweep|latency|throughput|seed-table|micro|compare|report ...",
        about: "Measure servers and engines, and compare what was measured",
        help: bench::HELP,
        run: bench::run,
    },
    Task {
        name: "test",
        usage: "[control|device|rocm|clients]",
        about: "Every test, cheapest first",
        help: test::HELP,
        run: test::run,
    },
    Task {
        name: "ci",
        usage: "[lint|proto|device-lint]",
        about: "Everything that a change must pass, cheapest first",
        help: ci::HELP,
        run: ci::run,
    },
    Task {
        name: "tidy",
        usage: "",
        about: "Check the rules that no other tool knows",
        help: tidy::HELP,
        run: tidy::run,
    },
    Task {
        name: "codegen",
        usage: "[--check]",
        about: "Generate the gRPC types from proto/",
        help: codegen::HELP,
        run: codegen::run,
    },
    Task {
        name: "sim",
        usage: "[--seeds N] [--minutes M] [--seed S]",
        about: "Run the control plane against a hash language model",
        help: sim::HELP,
        run: sim::run,
    },
    Task {
        name: "soak",
        usage: "[--minutes M] [--clients N] [--seed S]",
        about: "Load and faults: many clients, some of them rude, against a server",
        help: soak::HELP,
        run: soak::run,
    },
    Task {
        name: "fuzz",
        usage: "TARGET [--minutes M]",
        about: "Search a hostile file of a checkpoint that does harm",
        help: fuzz::HELP,
        run: fuzz::run,
    },
    Task {
        name: "mutants",
        usage: "[--only A,B] [--write|--check]",
        about: "Find each deliberate fault of the control plane",
        help: mutants::HELP,
        run: mutants::run,
    },
];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match dispatch(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(args: &[String]) -> Result<()> {
    let (name, rest) = match args {
        [] => ("help", args),
        [name, rest @ ..] => (name.as_str(), rest),
    };
    if matches!(name, "help" | "--help" | "-h") {
        println!("{}", overview());
        return Ok(());
    }
    let Some(task) = TASKS.iter().find(|task| task.name == name) else {
        bail!("there is no task `{name}`\n\n{}", overview());
    };
    // These hand their arguments on, those for help included; a bare one is the task's own.
    let hands_on = task.name == "serve" || (task.name == "bench" && rest.len() > 1);
    if !hands_on && rest.iter().any(|arg| arg == "--help" || arg == "-h") {
        println!("cargo xtask {} {}\n\n{}.\n\n{}", task.name, task.usage, task.about, task.help);
        return Ok(());
    }
    (task.run)(rest)
}

fn overview() -> String {
    let mut text = "usage: cargo xtask <task> [--help]\n\ntasks:".to_owned();
    for task in TASKS {
        let call = format!("{} {}", task.name, task.usage);
        text.push_str(&format!("\n  {call:<42}{}", task.about));
    }
    text
}
