//! Starting and ending the engine thread.

use std::error::Error;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use engine_types::StepExecutor;
use scheduler::{Scheduler, SchedulerConfig};

use crate::error::SpawnError;
use crate::handle::{EngineHandle, Shared};
use crate::runner::Runner;

/// How an engine runs.
#[derive(Clone, Debug, Default)]
pub struct EngineConfig {
    /// How the scheduler decides, and how many requests may be unfinished at once.
    pub scheduler: SchedulerConfig,
    /// How long a request may wait before it runs for the first time; then it ends with
    /// [`FinishReason::DeadlineExceeded`](engine_types::FinishReason::DeadlineExceeded). `None`
    /// sets no limit.
    pub max_queue_wait: Option<Duration>,
}

/// Starts engines.
#[derive(Debug)]
pub struct Engine;

impl Engine {
    /// Starts an engine thread; `make_executor` runs on it, so the executor need not be `Send`.
    ///
    /// Returns when the executor is made.
    ///
    /// # Errors
    ///
    /// If the executor cannot be made or the scheduler refuses its configuration.
    pub fn spawn<X, F, E>(
        config: EngineConfig,
        make_executor: F,
    ) -> Result<(EngineHandle, EngineThread), SpawnError>
    where
        X: StepExecutor,
        F: FnOnce() -> Result<X, E> + Send + 'static,
        E: Into<Box<dyn Error + Send + Sync>>,
    {
        let (ready_sender, ready) = mpsc::sync_channel(1);
        let run = move || {
            let runner = match start(config, make_executor) {
                Ok(runner) => runner,
                Err(error) => {
                    // The spawning thread waits for this and cannot have gone.
                    let _ = ready_sender.send(Err(error));
                    return;
                }
            };
            let _ = ready_sender.send(Ok(Arc::clone(runner.shared())));
            drop(ready_sender);
            runner.run();
        };
        let thread = thread::Builder::new()
            .name("engine".to_owned())
            .spawn(run)
            .map_err(SpawnError::Thread)?;
        let shared = ready.recv().map_err(|_| SpawnError::Panicked)??;
        let handle = EngineHandle::new(shared);
        Ok((handle.clone(), EngineThread { handle, thread: Some(thread) }))
    }
}

/// Makes the executor and the scheduler, on the engine thread.
fn start<X, F, E>(config: EngineConfig, make_executor: F) -> Result<Runner<X>, SpawnError>
where
    X: StepExecutor,
    F: FnOnce() -> Result<X, E>,
    E: Into<Box<dyn Error + Send + Sync>>,
{
    let executor = catch_unwind(AssertUnwindSafe(make_executor))
        .map_err(|_| SpawnError::Panicked)?
        .map_err(|error| SpawnError::Executor(error.into()))?;
    let limits = executor.limits();
    // The scheduler counts in the same way; counted here, a refusal need not wait for a step.
    let n_running = config.scheduler.max_num_seqs.min(limits.max_num_seqs) as usize;
    let max_unfinished = n_running + config.scheduler.max_queued_requests as usize;
    if config.max_queue_wait == Some(Duration::ZERO) {
        return Err(SpawnError::NoQueueWait);
    }
    let mode = config.scheduler.output_mode;
    let has_prefix_cache = config.scheduler.enable_prefix_caching;
    let scheduler = Scheduler::new(config.scheduler, limits).map_err(SpawnError::Scheduler)?;
    let shared = Shared::new(max_unfinished, scheduler.request_rules(), has_prefix_cache);
    Ok(Runner::new(executor, scheduler, Arc::new(shared), mode, config.max_queue_wait))
}

/// Owns the engine thread: dropping it aborts what is unfinished and waits for the thread.
#[derive(Debug)]
pub struct EngineThread {
    handle: EngineHandle,
    thread: Option<JoinHandle<()>>,
}

impl EngineThread {
    /// Takes no more requests, finishes those the engine has, and waits for that.
    pub fn drain(self) {
        self.handle.drain();
        self.join();
    }

    /// Waits until the engine has stopped; something must have asked it to.
    pub fn join(mut self) {
        self.wait();
    }

    fn wait(&mut self) {
        if let Some(thread) = self.thread.take() {
            // Panics of the loop are caught inside and show as the engine's fault.
            let _ = thread.join();
        }
    }
}

impl Drop for EngineThread {
    fn drop(&mut self) {
        self.handle.shutdown();
        self.wait();
    }
}
