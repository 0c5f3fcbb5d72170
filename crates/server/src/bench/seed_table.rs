//! `tandem bench seed-table`: what index sharing changes, by the protocol of the measurements that
//! first claimed it.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use bench::Load;
use clap::{Args, value_parser};
use serde::Serialize;
use settings::DEFAULT_MODEL;

use super::args::{Output, ProgramArgs};
use super::asked::Asked;
use super::drive::{Context, run};
use super::sitting::{Run, Sitting};
use super::subject::Subject;

/// The protocol: prompt tokens, generated tokens, requests, requests at a time, drafts a step.
const INPUT_LENS: [u32; 3] = [1024, 8192, 10_240];
const OUTPUT_LEN: u32 = 1024;
const NUM_PROMPTS: u32 = 160;
const CONCURRENCY: u32 = 16;
const NUM_SPECULATIVE_TOKENS: u32 = 3;

/// Servers without and with sharing, and without again: what the first and the last one differ by
/// is noise.
pub(super) const OFF: &str = "off";
pub(super) const ON: &str = "on";
pub(super) const OFF_AGAIN: &str = "off again";

#[derive(Debug, Args, Serialize)]
pub(crate) struct SeedTableArgs {
    /// Checkpoint folder, or the name of a bundled checkpoint
    #[arg(long, default_value = DEFAULT_MODEL)]
    pub(crate) model: String,
    /// Divide lengths and the number of requests by this; the title says so. 16 requests are left
    /// at least, which run at a time
    #[arg(long, default_value_t = 1, value_parser = value_parser!(u32).range(1..))]
    pub(crate) scale: u32,
    /// Rounds over all three servers; fewer than 3 say nothing of noise
    #[arg(long, default_value_t = 3, value_parser = value_parser!(u32).range(1..))]
    pub(crate) repeats: u32,
    /// More arguments of `tandem serve`, for all three servers
    #[arg(long, value_name = "ARGS", allow_hyphen_values = true, default_value = "")]
    pub(crate) serve_args: String,
    /// The program that is started [default: this one]
    #[arg(long, value_name = "FILE")]
    pub(crate) tandem: Option<PathBuf>,
    /// Seed of the prompts
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// The protocol, scaled down.
#[derive(Debug, PartialEq, Eq)]
struct Protocol {
    input_lens: [u32; 3],
    output_len: u32,
    num_prompts: u32,
}

impl Protocol {
    fn scaled(scale: u32) -> Self {
        let scaled = |n: u32| (n / scale).max(1);
        Self {
            input_lens: INPUT_LENS.map(scaled),
            output_len: scaled(OUTPUT_LEN),
            num_prompts: scaled(NUM_PROMPTS).max(CONCURRENCY),
        }
    }

    /// The longest request.
    fn len(&self) -> u32 {
        self.input_lens[2] + self.output_len
    }

    fn ensure_fits(&self, scale: u32, max_model_len: u32) -> Result<()> {
        ensure!(
            self.len() <= max_model_len,
            "--scale {scale}: requests have up to {} tokens, and this model takes {max_model_len}; \
             give --scale {} or more",
            self.len(),
            least_scale(max_model_len)
        );
        Ok(())
    }

    fn title(&self, scale: u32) -> String {
        let by = if scale == 1 { String::new() } else { format!(", scaled down by {scale}") };
        format!(
            "Index sharing off, on, off{by}: {} requests, {CONCURRENCY} at once, {} tokens out, \
             {NUM_SPECULATIVE_TOKENS} drafts a step",
            self.num_prompts, self.output_len
        )
    }
}

pub(super) async fn seed_table(args: &SeedTableArgs, context: Context) -> Result<()> {
    let protocol = Protocol::scaled(args.scale);
    let title = protocol.title(args.scale);
    let mut output = args.output.clone();
    if let Some(given) = &mut output.title {
        given.push_str(&format!(": {title}"));
    }
    let stop = context.stop.clone();
    let mut sitting = Sitting::new(context, &output, &title)?;
    let programs = ProgramArgs {
        tandem: args.tandem.clone(),
        api_key_file: None,
        checkpoint: None,
        served_model_name: None,
    };
    let mut subjects = vec![];
    for (name, share) in [(OFF, "off"), (ON, "on"), (OFF_AGAIN, "off")] {
        // A fixed number of drafts: the protocol has it, and both sides do the same.
        let what = format!(
            "--model {} --index-share {share} --num-speculative-tokens {NUM_SPECULATIVE_TOKENS} \
             --drafting fixed {}",
            args.model, args.serve_args
        );
        let subject = Subject::new(name, &what, &programs, &stop).await?;
        protocol.ensure_fits(args.scale, subject.max_model_len.unwrap_or(u32::MAX))?;
        subjects.push(subject);
    }
    let vocabulary = subjects[0].vocabulary.clone();
    let asked = |input_len: u32, repeat: u32| {
        let lens = (input_len, protocol.output_len);
        Asked::random((protocol.num_prompts, args.seed), repeat, lens, &vocabulary)
    };
    let longest = [asked(protocol.input_lens[2], 0)];
    for subject in &mut subjects {
        subject.take(&longest).await?;
        sitting.result.add_server(subject.server.clone());
    }
    let mut runs = vec![];
    for input_len in protocol.input_lens {
        let asked: Vec<Asked> = (0..args.repeats).map(|repeat| asked(input_len, repeat)).collect();
        runs.extend(rounds(&format!("{input_len} tokens in"), &asked, &subjects));
    }
    sitting.measure_all(&runs).await;
    sitting.result.judge_pairs(OFF, ON);
    sitting.result.judge_pairs(OFF, OFF_AGAIN);
    sitting.end()
}

/// Round by round, each in the other direction than the one before, so that what drifts meets all
/// alike.
fn rounds<'a>(name: &str, asked: &[Asked], subjects: &'a [Subject]) -> Vec<Run<'a>> {
    let load = Load::Closed { concurrency: CONCURRENCY as usize };
    let mut runs = vec![];
    for (repeat, asked) in (0..).zip(asked) {
        let mut order: Vec<&Subject> = subjects.iter().collect();
        if repeat % 2 == 1 {
            order.reverse();
        }
        runs.extend(order.into_iter().map(|subject| {
            let run = run(subject, name.to_owned(), load, asked.clone());
            Run { repeat, ..run }
        }));
    }
    runs
}

/// The least scale whose requests a model can hold.
fn least_scale(max_model_len: u32) -> u32 {
    (1..=INPUT_LENS[2]).find(|scale| Protocol::scaled(*scale).len() <= max_model_len).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_divide_what_is_asked_and_say_so() {
        let whole = Protocol::scaled(1);
        assert_eq!((whole.len(), whole.num_prompts), (11_264, 160));
        assert!(!whole.title(1).contains("scaled"));
        let scaled = Protocol::scaled(8);
        assert_eq!(scaled.input_lens, [128, 1024, 1280]);
        assert_eq!((scaled.output_len, scaled.num_prompts), (128, 20));
        assert!(scaled.title(8).contains("scaled down by 8"));
        assert_eq!(Protocol::scaled(64).num_prompts, 16);
    }

    #[test]
    fn the_least_scale_fits() {
        assert_eq!(least_scale(11_264), 1);
        let scale = least_scale(2048);
        assert!(Protocol::scaled(scale).len() <= 2048);
        assert!(Protocol::scaled(scale - 1).len() > 2048);
    }
}
