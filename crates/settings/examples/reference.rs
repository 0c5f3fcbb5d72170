//! Prints the tables of `docs/configuration.md`.
#![expect(clippy::print_stdout, reason = "its result goes to standard output")]

fn main() {
    print!("{}", settings::reference());
}
