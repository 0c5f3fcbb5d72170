//! What the mock server does, and what must be measured of it: counted and averaged here once more,
//! token by token and without any code of the library.

use std::time::Duration;

/// Tokens of the messages of an answer, in turn.
const BUNCHES: [u32; 4] = [1, 4, 2, 3];
/// Drafts that each message after the first one had.
pub(crate) const N_DRAFTS: u32 = 3;

/// How the server answers the request of a place.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Script {
    /// Whether a request waits until the one before it has ended.
    pub(crate) one_at_a_time: bool,
    /// How long its counts are waited for.
    pub(crate) stats_take: Duration,
}

/// One answer: after each pause, this many tokens; then the end, or an error.
pub(crate) struct Answer {
    pub(crate) messages: Vec<(Duration, u32)>,
    pub(crate) fails: bool,
}

/// What a step of the engine does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Decode,
    Prefill,
    Mixed,
}

fn ms(n: u32) -> Duration {
    Duration::from_millis(n.into())
}

impl Script {
    pub(crate) fn answer(&self, index: u32) -> Answer {
        if self.one_at_a_time {
            return Answer { messages: vec![(ms(50), 1), (ms(30), 4)], fails: false };
        }
        if index % 11 == 3 {
            return Answer { messages: vec![], fails: true };
        }
        // Some start slowly.
        let first = if index % 17 == 5 { 2_000 } else { 50 + 10 * (index % 7) };
        if index % 19 == 4 {
            return Answer { messages: vec![(ms(first), 1)], fails: false };
        }
        let gap = 20 + 8 * (index % 5);
        let n_messages = 3 + (index % 9) as usize;
        let bunches = BUNCHES.iter().cycle().skip((index % 4) as usize).take(n_messages);
        let pauses = std::iter::once(first).chain(std::iter::repeat(gap));
        let messages = pauses.zip(bunches).map(|(pause, n)| (ms(pause), *n)).collect();
        Answer { messages, fails: index % 13 == 7 }
    }

    /// The step that a message is of.
    pub(crate) fn step(index: u32, message_idx: usize) -> Step {
        match (message_idx, index % 3) {
            (0, 0) => Step::Mixed,
            (0, _) => Step::Prefill,
            _ => Step::Decode,
        }
    }

    /// The request that is sent at `due` and begun at `start`.
    fn life(&self, index: u32, due: Duration, start: Duration) -> Life {
        let answer = self.answer(index);
        let mut at = start.as_secs_f64();
        let arrival = |(pause, n_tokens): &(Duration, u32)| {
            at += pause.as_secs_f64();
            (at, *n_tokens)
        };
        let messages = answer.messages.iter().map(arrival).collect();
        Life { index, due: due.as_secs_f64(), messages, ended: at, fails: answer.fails }
    }

    /// The requests of a closed loop: each place takes the next one when it is free.
    pub(crate) fn closed(&self, n: u32, concurrency: usize) -> Vec<Life> {
        let mut free = vec![Duration::ZERO; concurrency];
        (0..n)
            .map(|index| {
                let place = free.iter_mut().min().unwrap();
                let life = self.life(index, *place, *place);
                *place = Duration::from_secs_f64(life.ended);
                life
            })
            .collect()
    }

    /// The requests of an open loop.
    pub(crate) fn open(&self, due: &[Duration]) -> Vec<Life> {
        let mut free = Duration::ZERO;
        (0..)
            .zip(due)
            .map(|(index, due)| {
                let start = if self.one_at_a_time { free.max(*due) } else { *due };
                let life = self.life(index, *due, start);
                free = Duration::from_secs_f64(life.ended);
                life
            })
            .collect()
    }
}

/// A request as it was served; times are seconds from the start of the run.
pub(crate) struct Life {
    pub(crate) index: u32,
    due: f64,
    /// When messages came, and their tokens.
    pub(crate) messages: Vec<(f64, u32)>,
    ended: f64,
    fails: bool,
}

/// Limits of good requests, milliseconds: to the first token, by token, and to the end. No answer
/// of the script is near them.
pub(crate) const LIMITS: [f64; 3] = [95.5, 15.3, 400.5];

/// Every figure of a run by its name.
pub(crate) fn figures(lives: &[Life]) -> Vec<(String, f64)> {
    let whole: Vec<&Life> = lives.iter().filter(|life| !life.fails).collect();
    let duration = whole.iter().map(|life| life.ended).fold(0.0, f64::max);
    let n_output: f64 = whole.iter().flat_map(|life| &life.messages).map(|(_, n)| f(*n)).sum();
    let n_good = whole.iter().filter(|life| life.is_good()).count();
    let n_whole = f(u32::try_from(whole.len()).unwrap());
    let mut figures = vec![
        ("requests".to_owned(), f(u32::try_from(lives.len()).unwrap())),
        ("completed".to_owned(), n_whole),
        ("failed".to_owned(), f(u32::try_from(lives.len()).unwrap()) - n_whole),
        ("duration".to_owned(), duration),
        ("output tokens".to_owned(), n_output),
        ("requests/s".to_owned(), n_whole / duration),
        ("output tokens/s".to_owned(), n_output / duration),
        // Each prompt is a token.
        ("tokens/s".to_owned(), (n_output + n_whole) / duration),
        ("goodput".to_owned(), f(u32::try_from(n_good).unwrap()) / duration),
        ("peak".to_owned(), peak(&whole, duration)),
        ("concurrency".to_owned(), whole.iter().map(|life| life.e2el()).sum::<f64>() / duration),
    ];
    let all = |of: &dyn Fn(&Life) -> Vec<f64>| -> Vec<f64> {
        whole.iter().flat_map(|life| of(life)).map(|seconds| seconds * 1e3).collect()
    };
    figures.extend(distribution("ttft", all(&|life| vec![life.ttft()])));
    figures.extend(distribution("tpot", all(&|life| life.tpot().into_iter().collect())));
    figures.extend(distribution("e2el", all(&|life| vec![life.e2el()])));
    figures.extend(distribution(
        "itl by message",
        all(&|life| life.gaps().into_iter().map(|(gap, _)| gap).collect()),
    ));
    figures.extend(distribution(
        "itl by token",
        all(&|life| {
            life.gaps().into_iter().flat_map(|(gap, n)| vec![gap / f(n); n as usize]).collect()
        }),
    ));
    figures.extend(distribution(
        "tokens a message",
        all(&|life| life.messages.iter().map(|(_, n)| f(*n) / 1e3).collect()),
    ));
    figures
}

fn f(n: u32) -> f64 {
    f64::from(n)
}

impl Life {
    fn ttft(&self) -> f64 {
        self.messages[0].0 - self.due
    }

    fn e2el(&self) -> f64 {
        self.ended - self.due
    }

    fn tpot(&self) -> Option<f64> {
        let n: u32 = self.messages.iter().map(|(_, n)| n).sum();
        (n > 1).then(|| (self.messages.last().unwrap().0 - self.messages[0].0) / f(n - 1))
    }

    fn gaps(&self) -> Vec<(f64, u32)> {
        let mut gaps = vec![];
        for i in 1..self.messages.len() {
            gaps.push((self.messages[i].0 - self.messages[i - 1].0, self.messages[i].1));
        }
        gaps
    }

    fn is_good(&self) -> bool {
        let [ttft, tpot, e2el] = LIMITS.map(|limit| limit / 1e3);
        self.ttft() < ttft && self.tpot().unwrap_or(0.0) < tpot && self.e2el() < e2el
    }
}

/// Mean, deviation, ends and percentiles: the least value that so many of 100 are at most.
fn distribution(name: &str, mut values: Vec<f64>) -> Vec<(String, f64)> {
    values.sort_by(f64::total_cmp);
    let n = f(u32::try_from(values.len()).unwrap());
    let mean = values.iter().sum::<f64>() / n;
    let std = (values.iter().map(|value| (value - mean) * (value - mean)).sum::<f64>() / n).sqrt();
    let at = |percent: usize| values[(values.len() * percent).div_ceil(100) - 1];
    let figures = [
        ("n", n),
        ("mean", mean),
        ("std", std),
        ("min", values[0]),
        ("p50", at(50)),
        ("p90", at(90)),
        ("p95", at(95)),
        ("p99", at(99)),
        ("max", values[values.len() - 1]),
    ];
    figures.into_iter().map(|(figure, value)| (format!("{name} {figure}"), value)).collect()
}

/// Tokens a second in the best of equal parts of a second or a little more: each millisecond
/// between two messages has its share of the second one's tokens.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "few milliseconds"
)]
fn peak(lives: &[&Life], duration: f64) -> f64 {
    let n_parts = (duration as usize).max(1);
    let mut parts = vec![0.0; n_parts];
    let part = |millis: usize| ((millis as f64 + 0.5) / 1e3 / duration * n_parts as f64) as usize;
    for life in lives {
        let millis: Vec<usize> =
            life.messages.iter().map(|(at, _)| (at * 1e3).round() as usize).collect();
        parts[part(millis[0]).min(n_parts - 1)] += f(life.messages[0].1);
        for (two, (_, n)) in millis.windows(2).zip(&life.messages[1..]) {
            for at in two[0]..two[1] {
                parts[part(at).min(n_parts - 1)] += f(*n) / (two[1] - two[0]) as f64;
            }
        }
    }
    parts.into_iter().fold(0.0, f64::max) / (duration / n_parts as f64)
}

/// Steps of a kind until a time.
pub(crate) fn n_steps(lives: &[Life], kind: Step, until: f64) -> u32 {
    let is_of = |life: &Life, (idx, (at, _)): (usize, &(f64, u32))| {
        *at <= until && Script::step(life.index, idx) == kind
    };
    let of_life = |life: &Life| {
        life.messages.iter().enumerate().filter(|message| is_of(life, *message)).count()
    };
    u32::try_from(lives.iter().map(of_life).sum::<usize>()).unwrap()
}
