//! Servers that do not tell what they should, or fail where no request does.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bench::{
    Batches, Counted, Counters, Failure, Load, Measured, Metrics, Piece, Pieces, Plan, Planned,
    Prompt, Record, Slo, Target, Totals, Watcher, measure, measure_batches,
};
use tokio_util::sync::CancellationToken;

/// What is odd about a server.
#[derive(Clone, Copy, PartialEq)]
enum Odd {
    Nothing,
    /// From the second time on its counts fail.
    CountsFail,
    /// From the second time on they never come.
    CountsHang,
    /// From the second time on they are those of another server.
    CountsRestart,
    /// It cannot be made to forget.
    Remembers,
    /// It sends text without ids, and the total at the end.
    UsageOnly,
    /// It sends text alone.
    TextOnly,
}

struct OddServer {
    odd: Odd,
    n_asked: AtomicU64,
}

#[async_trait::async_trait]
impl Target for OddServer {
    async fn send(&self, _: &Planned) -> Result<Pieces, Failure> {
        let piece = match self.odd {
            Odd::UsageOnly | Odd::TextOnly => Piece::Text,
            _ => Piece::Tokens(3),
        };
        let n_output = (self.odd != Odd::TextOnly).then_some(6);
        let end = Piece::Finished(Totals { n_prompt: None, n_output });
        Ok(Box::pin(tokio_stream::iter([Ok(piece), Ok(piece), Ok(end)])))
    }

    async fn forget_prompts(&self) -> Result<bool, Failure> {
        Ok(self.odd != Odd::Remembers)
    }

    async fn counters(&self) -> Result<Option<Counters>, Failure> {
        let n_before = self.n_asked.fetch_add(1, Ordering::SeqCst);
        let mut decode_steps = 10 + n_before;
        match self.odd {
            _ if n_before == 0 => {}
            Odd::CountsFail => return Err(Failure::new("Unavailable", "no luck")),
            Odd::CountsHang => std::future::pending().await,
            Odd::CountsRestart => decode_steps = 1,
            _ => {}
        }
        Ok(Some(Counters { decode_steps, ..Counters::default() }))
    }
}

struct Nobody;

impl Watcher for Nobody {
    fn begins(&mut self) {}

    fn ended(&mut self, _: &Record) {}
}

/// A run, and batches.
async fn both(odd: Odd) -> [Result<Measured, Failure>; 2] {
    let server = || -> Arc<dyn Target> { Arc::new(OddServer { odd, n_asked: AtomicU64::new(0) }) };
    let planned = Planned::greedy(Prompt::TokenIds(vec![7]), 8);
    let requests: Arc<[Planned]> = vec![Planned { ignore_eos: true, ..planned }; 4].into();
    let (stop, load) = (CancellationToken::new(), Load::Closed { concurrency: 2 });
    let plan = Plan { requests: requests.clone(), load, warm_up: requests.clone(), seed: 0 };
    let batches = Batches { requests, n_warmup: 1, n: 1 };
    let run = measure(&server(), &plan, &stop, &mut Nobody).await;
    let batches = measure_batches(&server(), &batches, &stop, &mut Nobody).await;
    [run, batches.map(|(measured, _)| measured)]
}

#[tokio::test(start_paused = true)]
async fn a_run_outlives_its_counts() {
    for odd in [Odd::Nothing, Odd::CountsFail, Odd::CountsHang] {
        for measured in both(odd).await {
            let measured = measured.unwrap();
            assert_eq!(measured.records.len(), 4);
            assert_eq!(measured.counters.is_some(), odd == Odd::Nothing);
            assert!(!measured.is_partial && !measured.kept_prompts);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn counts_of_two_servers_are_of_no_run() {
    for measured in both(Odd::CountsRestart).await {
        let failure = measured.unwrap_err();
        assert!(failure.message.contains("started anew while it was measured"), "{failure}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_that_remembers_is_noted() {
    for measured in both(Odd::Remembers).await {
        assert!(measured.unwrap().kept_prompts);
    }
}

#[tokio::test(start_paused = true)]
async fn how_tokens_were_counted_is_noted() {
    for (odd, counted, n_short, n_tokens) in [
        (Odd::Nothing, Counted::Ids, 4, 24),
        (Odd::UsageOnly, Counted::Usage, 4, 24),
        (Odd::TextOnly, Counted::Messages, 0, 8),
    ] {
        for measured in both(odd).await {
            let metrics = Metrics::of(&measured.unwrap().records, &Slo::default());
            let found = (metrics.counted, metrics.n_short, metrics.n_output_tokens);
            assert_eq!(found, (counted, n_short, n_tokens));
        }
    }
}
