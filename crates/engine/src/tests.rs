//! The loop around a scripted executor: every request ends exactly once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use engine_types::{
    ExecutorError, ExecutorLimits, FinishReason, IndexerCounts, OutputMode, Request, RequestEvent,
    RequestId, SamplingParams, StepExecutor, StepOutcome, StepPlan, StepQueue,
};
use scheduler::SchedulerConfig;

use crate::{
    Delivery, Engine, EngineConfig, EngineHandle, EngineThread, EventSink, Events, SpawnError,
    SubmitError, channel,
};

const OK: u8 = 0;
const FAIL_STEP: u8 = 1;
pub(crate) const FAIL_FOR_GOOD: u8 = 2;
pub(crate) const PANIC: u8 = 3;

/// More tokens than an engine yields while a test looks at it, however slow the machine is: five
/// seconds of steps.
pub(crate) const ENDLESS: u32 = 5000;

/// What the executor's indexers do in each step, a failing one included.
const LAUNCH: IndexerCounts = IndexerCounts { n_launches: 1, n_rows: 2, n_scored_keys: 30 };

/// Counts up, 1 ms a step, and fails when told to.
struct Counting {
    fault: Arc<AtomicU8>,
    queue: StepQueue,
}

impl StepExecutor for Counting {
    fn limits(&self) -> ExecutorLimits {
        ExecutorLimits {
            block_size: 4,
            num_blocks: 4096,
            max_model_len: 8192,
            max_num_seqs: 2,
            max_num_batched_tokens: 16,
            max_num_speculative_tokens: 0,
            n_lookahead_max: 0,
            vocab_size: 10_000,
        }
    }

    fn launch(&mut self, plan: &StepPlan) {
        self.queue.launch(plan);
    }

    fn collect(&mut self, outcome: &mut StepOutcome) -> Result<(), ExecutorError> {
        self.queue.collect(outcome, |plan, outcome| Self::run(&self.fault, plan, outcome))
    }
}

impl Counting {
    fn run(
        fault: &AtomicU8,
        plan: &StepPlan,
        outcome: &mut StepOutcome,
    ) -> Result<(), ExecutorError> {
        std::thread::sleep(Duration::from_millis(1));
        outcome.indexer.target_verify = LAUNCH;
        outcome.indexer.draft_steps[2] = LAUNCH;
        match fault.swap(OK, Ordering::SeqCst) {
            FAIL_STEP => return Err(ExecutorError::Step("no luck".into())),
            FAIL_FOR_GOOD => return Err(ExecutorError::Fatal("burnt out".into())),
            PANIC => panic!("as the test asked"),
            _ => {}
        }
        for row in plan.rows() {
            let next = plan.tokens(row).last().expect("[INV-6]") + 1;
            let run = if row.samples { vec![next] } else { vec![] };
            outcome.push_row(row.request_id, &run, 0, &[]);
        }
        Ok(())
    }
}

pub(crate) fn start(
    max_queued_requests: u32,
    output_mode: OutputMode,
) -> (EngineHandle, EngineThread, Arc<AtomicU8>) {
    start_with(SchedulerConfig { max_queued_requests, output_mode, ..SchedulerConfig::default() })
}

/// Makes a test for each output mode of a function that takes one.
macro_rules! in_both_modes {
    ($name:ident) => {
        mod $name {
            #[test]
            fn immediate() {
                super::$name(engine_types::OutputMode::Immediate);
            }

            #[test]
            fn deferred() {
                super::$name(engine_types::OutputMode::Deferred);
            }
        }
    };
}

pub(crate) fn start_with(
    scheduler: SchedulerConfig,
) -> (EngineHandle, EngineThread, Arc<AtomicU8>) {
    let fault = Arc::new(AtomicU8::new(OK));
    let executor = Counting { fault: Arc::clone(&fault), queue: StepQueue::default() };
    let (handle, thread) =
        Engine::spawn(EngineConfig { scheduler, ..EngineConfig::default() }, move || {
            Ok::<_, ExecutorError>(executor)
        })
        .unwrap();
    (handle, thread, fault)
}

fn request(handle: &EngineHandle, max_tokens: u32) -> Request {
    let params = SamplingParams { max_tokens, ignore_eos: true, ..SamplingParams::default() };
    Request {
        id: handle.next_request_id(),
        prompt: vec![1, 2],
        params,
        cache_salt: None,
        priority: 0,
        guide: None,
        stop_texts: None,
        siblings: vec![],
    }
}

pub(crate) fn submit(handle: &EngineHandle, max_tokens: u32) -> (RequestId, Events) {
    let request = request(handle, max_tokens);
    let id = request.id;
    let (sink, events) = channel(max_tokens as usize);
    handle.submit(request, Box::new(sink)).unwrap();
    (id, events)
}

/// Reads to the end: the tokens, and the one reason.
pub(crate) fn read(events: Events) -> (Vec<u32>, FinishReason) {
    let (mut tokens, mut reasons) = (vec![], vec![]);
    for event in events {
        match event {
            RequestEvent::Tokens(step) => tokens.extend(step.tokens),
            RequestEvent::Finished { reason, .. } => reasons.push(reason),
            RequestEvent::Started { .. } => assert!(tokens.is_empty(), "it starts first"),
            _ => unreachable!(),
        }
    }
    assert_eq!(reasons.len(), 1, "exactly one Finished");
    (tokens, reasons.remove(0))
}

pub(crate) fn wait_until(what: impl Fn() -> bool) {
    let started = Instant::now();
    while !what() {
        assert!(started.elapsed() < Duration::from_secs(30), "not within 30 seconds");
        std::thread::sleep(Duration::from_millis(1));
    }
}

in_both_modes!(requests_run_and_drain);

fn requests_run_and_drain(mode: OutputMode) {
    let (handle, thread, _) = start(8, mode);
    let all: Vec<_> = (0..6).map(|_| submit(&handle, 20).1).collect();
    thread.drain();
    for events in all {
        assert_eq!(read(events), ((3..23).collect(), FinishReason::MaxTokens));
    }
    let stats = handle.stats();
    assert!(!stats.is_alive && stats.n_unfinished == 0);
    assert_eq!(stats.scheduler.n_finished, 6);
    let (sink, _events) = channel(1);
    let refused = handle.submit(request(&handle, 1), Box::new(sink));
    assert_eq!(refused, Err(SubmitError::ShuttingDown));
}

in_both_modes!(a_full_queue_and_bad_requests_are_refused_at_once);

fn a_full_queue_and_bad_requests_are_refused_at_once(mode: OutputMode) {
    let (handle, _thread, _) = start(3, mode);
    let all: Vec<_> = (0..5).map(|_| submit(&handle, ENDLESS)).collect();
    let (sink, _events) = channel(1);
    let refused = handle.submit(request(&handle, 1), Box::new(sink));
    assert_eq!(refused, Err(SubmitError::QueueFull { limit: 5 }));
    let (sink, _events) = channel(1);
    let refused = handle.submit(request(&handle, 0), Box::new(sink));
    assert_eq!(refused, Err(SubmitError::Invalid(scheduler::SubmitError::ZeroMaxTokens)));
    for (id, events) in all {
        assert!(handle.abort(id));
        assert_eq!(read(events).1, FinishReason::Aborted);
    }
    assert_eq!(read(submit(&handle, 30).1).1, FinishReason::MaxTokens, "there is room again");
}

in_both_modes!(ids_are_unique_while_unfinished);

fn ids_are_unique_while_unfinished(mode: OutputMode) {
    let (handle, _thread, _) = start(3, mode);
    let (id, _events) = submit(&handle, ENDLESS);
    let again = Request { id, ..request(&handle, 1) };
    let (sink, _unread) = channel(1);
    assert_eq!(handle.submit(again, Box::new(sink)), Err(SubmitError::DuplicateId));
}

in_both_modes!(aborts_end_running_and_queued_requests_and_ignore_strangers);

fn aborts_end_running_and_queued_requests_and_ignore_strangers(mode: OutputMode) {
    let (handle, _thread, _) = start(8, mode);
    let all: Vec<_> = (0..4).map(|_| submit(&handle, ENDLESS)).collect();
    wait_until(|| handle.stats().scheduler.n_running == 2);
    for (id, _) in &all {
        assert!(handle.abort(*id));
    }
    for (id, events) in all {
        assert_eq!(read(events).1, FinishReason::Aborted);
        wait_until(|| !handle.abort(id));
    }
    assert!(!handle.abort(RequestId(999)));
    wait_until(|| handle.stats().scheduler.blocks.n_used == 0);
}

in_both_modes!(a_failed_step_fails_its_rows_only);

fn a_failed_step_fails_its_rows_only(mode: OutputMode) {
    let (handle, _thread, fault) = start(8, mode);
    let all = [ENDLESS, ENDLESS, 50].map(|max_tokens| submit(&handle, max_tokens).1);
    wait_until(|| handle.stats().scheduler.n_running == 2);
    // The step in flight may still be one of the first request alone.
    let n_steps = handle.stats().n_steps;
    wait_until(|| handle.stats().n_steps > n_steps + 2);
    fault.store(FAIL_STEP, Ordering::SeqCst);
    let reasons = all.map(|events| read(events).1);
    let failed = FinishReason::Failed("no luck".into());
    assert_eq!(reasons, [failed.clone(), failed, FinishReason::MaxTokens]);
    assert_eq!(handle.stats().n_failed_steps, 1);
}

in_both_modes!(what_indexers_did_adds_up_over_the_steps_that_did_not_fail);

fn what_indexers_did_adds_up_over_the_steps_that_did_not_fail(mode: OutputMode) {
    let (handle, thread, fault) = start(8, mode);
    let (_, long) = submit(&handle, ENDLESS);
    wait_until(|| handle.stats().n_steps > 3);
    fault.store(FAIL_STEP, Ordering::SeqCst);
    assert_eq!(read(long).1, FinishReason::Failed("no luck".into()));
    assert_eq!(read(submit(&handle, 5).1).1, FinishReason::MaxTokens);
    thread.drain();
    let stats = handle.stats();
    let n = stats.n_steps - 1;
    let sum = IndexerCounts { n_launches: n, n_rows: 2 * n, n_scored_keys: 30 * n };
    assert_eq!(stats.indexer.target_verify, sum);
    assert_eq!(stats.indexer.draft_steps[2], sum);
    assert_eq!(stats.indexer.draft(), sum);
    assert_eq!(stats.indexer.target_prefill, IndexerCounts::default());
}

in_both_modes!(death_answers_everyone_and_refuses_the_rest);

fn death_answers_everyone_and_refuses_the_rest(mode: OutputMode) {
    for (how, text) in [(FAIL_FOR_GOOD, "burnt out"), (PANIC, "as the test asked")] {
        let (handle, _thread, fault) = start(8, mode);
        let all: Vec<_> = (0..5).map(|_| submit(&handle, ENDLESS).1).collect();
        wait_until(|| handle.stats().scheduler.n_running == 2);
        fault.store(how, Ordering::SeqCst);
        for events in all {
            let (_, reason) = read(events);
            assert!(
                matches!(&reason, FinishReason::Failed(why) if why.contains(text)),
                "{reason:?}"
            );
        }
        assert!(!handle.is_alive() && handle.stats().n_unfinished == 0);
        let (sink, _events) = channel(1);
        let refused = handle.submit(request(&handle, 1), Box::new(sink));
        assert!(matches!(refused, Err(SubmitError::Dead(why)) if why.contains(text)));
    }
}

in_both_modes!(dropping_the_thread_aborts_everyone);

fn dropping_the_thread_aborts_everyone(mode: OutputMode) {
    let (handle, thread, _) = start(8, mode);
    let all: Vec<_> = (0..5).map(|_| submit(&handle, ENDLESS).1).collect();
    drop(thread);
    for events in all {
        assert_eq!(read(events).1, FinishReason::Aborted);
    }
    assert!(!handle.is_alive() && handle.fault().is_none());
}

/// Takes `n_left` steps, then says `then`; counts its ends.
struct Limited {
    n_left: usize,
    then: Delivery,
    n_finished: Arc<AtomicU8>,
}

impl EventSink for Limited {
    fn send(&mut self, event: RequestEvent) -> Delivery {
        if let RequestEvent::Finished { reason, .. } = event {
            assert_eq!(reason, FinishReason::Aborted);
            self.n_finished.fetch_add(1, Ordering::SeqCst);
            return Delivery::Ok;
        }
        if self.n_left == 0 {
            return self.then;
        }
        self.n_left -= 1;
        Delivery::Ok
    }
}

in_both_modes!(a_sink_that_takes_no_more_ends_its_request_and_no_other);

fn a_sink_that_takes_no_more_ends_its_request_and_no_other(mode: OutputMode) {
    for then in [Delivery::Closed, Delivery::Full] {
        let (handle, _thread, _) = start(8, mode);
        let n_finished = Arc::new(AtomicU8::new(0));
        let sink = Limited { n_left: 2, then, n_finished: Arc::clone(&n_finished) };
        handle.submit(request(&handle, ENDLESS), Box::new(sink)).unwrap();
        let (_, other) = submit(&handle, 30);
        assert_eq!(read(other).1, FinishReason::MaxTokens);
        assert_eq!(n_finished.load(Ordering::SeqCst), 1);
        assert_eq!(handle.stats().n_unfinished, 0);
    }
}

in_both_modes!(an_idle_engine_does_not_step);

fn an_idle_engine_does_not_step(mode: OutputMode) {
    let (handle, _thread, _) = start(8, mode);
    assert_eq!(read(submit(&handle, 5).1).0.len(), 5);
    std::thread::sleep(Duration::from_millis(30));
    assert_eq!(handle.stats().n_steps, 5);
}

#[test]
fn a_start_that_fails_says_why() {
    let failing = || Err::<Counting, _>(ExecutorError::Fatal("no weights".into()));
    let error = Engine::spawn(EngineConfig::default(), failing).unwrap_err();
    assert!(error.to_string().contains("no weights"), "{error}");
    let panicking = || -> Result<Counting, ExecutorError> { panic!("as the test asked") };
    let error = Engine::spawn(EngineConfig::default(), panicking).unwrap_err();
    assert!(matches!(error, SpawnError::Panicked));
    let scheduler = SchedulerConfig { num_speculative_tokens: 1, ..SchedulerConfig::default() };
    let executor = Counting { fault: Arc::default(), queue: StepQueue::default() };
    let spawned = Engine::spawn(EngineConfig { scheduler, ..EngineConfig::default() }, || {
        Ok::<_, ExecutorError>(executor)
    });
    assert!(matches!(spawned.unwrap_err(), SpawnError::Scheduler(_)));
}

in_both_modes!(siblings_have_events_of_their_own);

fn siblings_have_events_of_their_own(mode: OutputMode) {
    let (handle, thread, _) = start(8, mode);
    let siblings = vec![handle.next_request_id(), handle.next_request_id()];
    let request = Request { siblings, ..request(&handle, 20) };
    let (sinks, events): (Vec<_>, Vec<_>) = (0..3).map(|_| channel(20)).unzip();
    let sinks = sinks.into_iter().map(|sink| Box::new(sink) as Box<dyn EventSink>).collect();
    handle.submit_all(request, sinks, None).unwrap();
    thread.drain();
    assert_eq!(handle.stats().scheduler.n_finished, 3);
    for events in events {
        assert_eq!(read(events), ((3..23).collect(), FinishReason::MaxTokens));
    }
    // Two run at once: the third one starts when nobody has its prompt any more.
    assert_eq!(handle.stats().scheduler.n_shared_tokens, 1, "one token of the prompt's two");
}

in_both_modes!(deadlines_end_requests_that_run_and_that_wait);

fn deadlines_end_requests_that_run_and_that_wait(mode: OutputMode) {
    let (handle, _thread, _) = start(8, mode);
    let submit_until = |deadline| {
        let (sink, events) = channel(ENDLESS as usize);
        let request = request(&handle, ENDLESS);
        handle.submit_all(request, vec![Box::new(sink)], deadline).unwrap();
        events
    };
    let all: Vec<_> = [20, 30, 40]
        .map(|ms| submit_until(Some(Instant::now() + Duration::from_millis(ms))))
        .into_iter()
        .collect();
    for events in all {
        assert_eq!(read(events).1, FinishReason::DeadlineExceeded);
    }
    let far = Instant::now() + Duration::from_secs(3600);
    let (sink, events) = channel(8);
    handle.submit_all(request(&handle, 8), vec![Box::new(sink)], Some(far)).unwrap();
    assert_eq!(read(events).1, FinishReason::MaxTokens, "in time");
    wait_until(|| handle.stats().scheduler.blocks.n_used == 0);
}

/// Two run; the third has waited long enough, and those that run are not concerned. The time is
/// more than a machine under load takes to start the two.
#[test]
fn a_request_waits_no_longer_than_it_may() {
    let executor = Counting { fault: Arc::default(), queue: StepQueue::default() };
    let config =
        EngineConfig { max_queue_wait: Some(Duration::from_secs(1)), ..EngineConfig::default() };
    let (handle, _thread) =
        Engine::spawn(config, move || Ok::<_, ExecutorError>(executor)).unwrap();
    let running = [ENDLESS, ENDLESS].map(|max_tokens| submit(&handle, max_tokens));
    wait_until(|| handle.stats().scheduler.n_running == 2);
    let (tokens, reason) = read(submit(&handle, 5).1);
    assert_eq!((tokens, reason), (vec![], FinishReason::DeadlineExceeded));
    for (id, events) in running {
        assert!(handle.abort(id));
        assert_eq!(read(events).1, FinishReason::Aborted);
    }
    let never = EngineConfig { max_queue_wait: Some(Duration::ZERO), ..EngineConfig::default() };
    let executor = Counting { fault: Arc::default(), queue: StepQueue::default() };
    let error = Engine::spawn(never, move || Ok::<_, ExecutorError>(executor)).unwrap_err();
    assert!(error.to_string().contains("max_queue_wait is 0"), "{error}");
}
