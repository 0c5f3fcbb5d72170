//! One client: call after call, each with an end in mind.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use grpc_api::inference::v1::{AbortRequestRequest, GenerateStreamRequest, GenerateStreamResponse};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tonic::{Code, Request, Response, Status, Streaming};
use tonic_types::StatusExt as _;

use crate::answer::Answer;
use crate::connection::Connection;
use crate::requests::{Limits, Wish, unary};
use crate::rng::Rng;
use crate::tally::Tally;

/// The time within which a server has freed what a client that left had.
const FREED_WITHIN: Duration = Duration::from_millis(500);

/// A request that has been on its way for longer has surely been taken.
const ON_THE_WAY_MAX: Duration = Duration::from_secs(2);

/// What all clients share.
pub(crate) struct Shared {
    pub(crate) address: String,
    /// A connection that is never cut.
    pub(crate) control: Connection,
    pub(crate) limits: Limits,
    /// How long a call may take before it counts as never answered.
    pub(crate) patience: Duration,
    pub(crate) drain_timeout: Duration,
    pub(crate) tally: Mutex<Tally>,
    /// Set when no client is to begin another call.
    pub(crate) stop: AtomicBool,
    /// When the server was told to stop.
    pub(crate) signalled: OnceLock<Instant>,
}

/// Why a call ended early, and whether the server had taken its request.
struct Broken {
    status: Status,
    taken: bool,
}

impl Shared {
    pub(crate) fn tally(&self) -> MutexGuard<'_, Tally> {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn stops(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Counts a call that ended, or that its client left.
    fn count(&self, what: &'static str, wish: &Wish, answer: &Answer, end: Result<bool, String>) {
        let mut tally = self.tally();
        tally.n_tokens += answer.n_tokens();
        let mut outcome = end.and_then(|is_whole| {
            if !is_whole {
                return Ok("left");
            }
            answer.check(wish, self.limits)?;
            Ok(if answer.is_aborted() { "aborted" } else { "finished" })
        });
        if let Some(which) = wish.repeated {
            tally.n_compared += 1;
            if let Err(fault) = tally.repeated.check(which, answer) {
                outcome = Err(fault);
            }
        }
        let may_abort = what == "abort" || self.drain_is_over();
        if outcome == Ok("aborted") && !may_abort {
            outcome = Err("ended as aborted, by nobody".to_owned());
        }
        tally.count(what, outcome);
    }

    fn drain_is_over(&self) -> bool {
        self.signalled.get().is_some_and(|at| at.elapsed() >= self.drain_timeout)
    }

    /// The name of an end that any call may have; otherwise what is wrong with it.
    fn judge(&self, broken: &Broken, begun: Instant) -> Result<&'static str, String> {
        let Broken { status, taken } = broken;
        let details = status.get_error_details();
        let reason = details.error_info().map_or("", |info| info.reason.as_str());
        let is_complete = details.retry_info().is_some() && details.quota_failure().is_some();
        let signalled = self.signalled.get();
        // Whether it may have reached the server after the signal.
        let is_late = !taken && signalled.is_some_and(|at| begun + ON_THE_WAY_MAX > *at);
        match (status.code(), reason) {
            (Code::ResourceExhausted, "QUEUE_FULL") if is_complete => Ok("queue full"),
            (Code::Unavailable, "DRAINING") if is_late => Ok("draining"),
            (Code::Unavailable | Code::Cancelled | Code::Unknown, "")
                if signalled.is_some_and(|at| begun > *at) && !taken =>
            {
                Ok("gone")
            }
            _ => Err(format!("{status:?} (taken: {taken})")),
        }
    }
}

/// A client with a connection of its own.
pub(crate) struct Client {
    shared: Arc<Shared>,
    rng: Rng,
    connection: Connection,
}

impl Client {
    pub(crate) async fn open(shared: &Arc<Shared>, rng: Rng) -> Result<Self, String> {
        let connection = connect(&shared.address).await?;
        Ok(Self { shared: Arc::clone(shared), rng, connection })
    }

    /// Calls until told to stop.
    pub(crate) async fn run(mut self) {
        while !self.shared.stops() {
            match self.rng.between(0, 999) {
                0..200 => self.leave().await,
                200..250 => self.invalid().await,
                250..300 => self.too_short().await,
                300..350 => self.abort().await,
                350..354 => self.burst().await,
                354..700 => self.whole("stream").await,
                _ => self.whole("unary").await,
            }
        }
    }

    /// Calls that should be answered in full, until the server is gone.
    pub(crate) async fn run_until_refused(mut self) {
        while self.shared.signalled.get().is_none_or(|at| at.elapsed() < Duration::from_secs(1)) {
            let what = *self.rng.pick(&["stream", "unary"]);
            self.whole(what).await;
        }
    }

    /// A call that is answered in full.
    async fn whole(&mut self, what: &'static str) {
        let wish = self.shared.limits.valid(&mut self.rng);
        let mut answer = Answer::new(&wish.request);
        let begun = Instant::now();
        let call = self.call(what, &wish, None, &mut answer);
        let end = patient(self.shared.patience, call).await;
        self.settle(what, &wish, &answer, (begun, end)).await;
    }

    /// Makes a call of either kind.
    fn call<'a>(
        &self,
        what: &'static str,
        wish: &Wish,
        limit: Option<Duration>,
        answer: &'a mut Answer,
    ) -> impl Future<Output = Result<(), Broken>> + use<'a> {
        let mut client = self.connection.inference();
        let request = wish.request.clone();
        async move {
            if what == "unary" {
                let reply = client.generate(limited(unary(request), limit)).await;
                let reply = reply.map_err(|status| Broken { status, taken: false })?;
                *answer = Answer::of(reply.into_inner());
                return Ok(());
            }
            let stream = client.generate_stream(limited(request, limit)).await;
            let mut stream = named(stream, answer)?;
            loop {
                match stream.message().await {
                    Ok(Some(message)) => answer.add(message),
                    Ok(None) => return Ok(()),
                    Err(status) => return Err(Broken { status, taken: true }),
                }
            }
        }
    }

    /// Counts the end of a call and waits where the server asks for it.
    async fn settle(
        &mut self,
        what: &'static str,
        wish: &Wish,
        answer: &Answer,
        (begun, end): (Instant, Result<(), Broken>),
    ) {
        match end {
            Ok(()) => self.shared.count(what, wish, answer, Ok(true)),
            Err(broken) => {
                let outcome = self.shared.judge(&broken, begun);
                self.shared.tally().count(what, outcome);
                if matches!(broken.status.code(), Code::ResourceExhausted | Code::Unavailable) {
                    sleep(Duration::from_millis(u64::from(self.rng.between(50, 1000)))).await;
                }
            }
        }
    }

    /// Leaves a call at some moment: drops the call, or cuts the connection.
    async fn leave(&mut self) {
        let what = if self.rng.chance(60) { "stream" } else { "unary" };
        let (row, next) = if self.rng.chance(50) {
            ("leave the call", None)
        } else {
            match connect(&self.shared.address).await {
                Ok(next) => ("leave the connection", Some(next)),
                Err(fault) => return self.shared.tally().count("connect", Err(fault)),
            }
        };
        let wish = self.shared.limits.valid(&mut self.rng);
        let mut answer = Answer::new(&wish.request);
        let begun = Instant::now();
        let stay = Duration::from_millis(u64::from(match self.rng.between(0, 2) {
            0 => self.rng.between(0, 5),
            1 => self.rng.between(5, 100),
            _ => self.rng.between(100, 1500),
        }));
        let mut call = Box::pin(self.call(what, &wish, None, &mut answer));
        if let Ok(end) = timeout(stay, &mut call).await {
            drop(call);
            self.settle(row, &wish, &answer, (begun, end)).await;
            return;
        }
        if let Some(next) = next {
            // While the call goes on, so that it is not reset before.
            std::mem::replace(&mut self.connection, next).cut();
        }
        drop(call);
        self.shared.count(row, &wish, &answer, Ok(false));
        if let Some(id) = answer.unfinished() {
            let shared = Arc::clone(&self.shared);
            tokio::spawn(async move {
                sleep(FREED_WITHIN).await;
                // Only an unfinished request can be aborted.
                let request = AbortRequestRequest { request_id: id };
                let outcome = match shared.control.inference().abort_request(request).await {
                    Ok(_) => Ok("still there"),
                    Err(status) if status.code() == Code::NotFound => Ok("freed"),
                    Err(status) => Err(format!("{status:?}")),
                };
                shared.tally().count("500 ms after leaving", outcome);
            });
        }
    }

    /// A request with a fault.
    async fn invalid(&mut self) {
        let (request, field) = self.shared.limits.invalid(&mut self.rng);
        let wish = Wish { request, repeated: None };
        let mut answer = Answer::new(&GenerateStreamRequest::default());
        let what = if self.rng.chance(50) { "stream" } else { "unary" };
        let call = self.call(what, &wish, None, &mut answer);
        let outcome = match (patient(self.shared.patience, call).await, field) {
            (Ok(()), _) => Err(format!("{field:?} was taken")),
            (Err(Broken { status, .. }), None) if status.code() == Code::OutOfRange => {
                Ok("too large")
            }
            (Err(Broken { status, .. }), field) => {
                let violations = status
                    .get_details_bad_request()
                    .map_or_else(Vec::new, |it| it.field_violations);
                let is_named =
                    violations.iter().any(|violation| Some(violation.field.as_str()) == field);
                if is_named && status.code() == Code::InvalidArgument {
                    Ok("field named")
                } else {
                    Err(format!("{field:?}: {status:?}"))
                }
            }
        };
        self.shared.tally().count("invalid", outcome);
    }

    /// A call whose deadline may be too short.
    async fn too_short(&mut self) {
        let wish = self.shared.limits.valid(&mut self.rng);
        let mut answer = Answer::new(&wish.request);
        let what = if self.rng.chance(50) { "stream" } else { "unary" };
        let limit = Duration::from_millis(u64::from(self.rng.between(1, 400)));
        let begun = Instant::now();
        let call = self.call(what, &wish, Some(limit), &mut answer);
        let end = patient(self.shared.patience, call).await;
        let outcome = match &end {
            // What came before is right as well.
            Err(Broken { status, .. }) if status.code() == Code::DeadlineExceeded => "deadline",
            // tonic's client looks at the clock, too, until the answer begins.
            Err(Broken { status, taken: false }) if status.code() == Code::Cancelled => {
                "client's deadline"
            }
            _ => {
                self.settle("short deadline", &wish, &answer, (begun, end)).await;
                return;
            }
        };
        self.shared.tally().count("short deadline", Ok(outcome));
    }

    /// A call that ends one of its outputs through AbortRequest.
    async fn abort(&mut self) {
        let wish = self.shared.limits.valid(&mut self.rng);
        let mut answer = Answer::new(&wish.request);
        let begun = Instant::now();
        let n_messages = self.rng.between(1, 20);
        let call = self.aborted(&wish, n_messages, &mut answer);
        let end = patient(self.shared.patience, call).await;
        self.settle("abort", &wish, &answer, (begun, end)).await;
    }

    async fn aborted(
        &self,
        wish: &Wish,
        n_messages: u32,
        answer: &mut Answer,
    ) -> Result<(), Broken> {
        let mut client = self.connection.inference();
        let stream = client.generate_stream(wish.request.clone()).await;
        let mut stream = named(stream, answer)?;
        let broken = |status| Broken { status, taken: true };
        for n in 1.. {
            let Some(message) = stream.message().await.map_err(broken)? else { break };
            let request_id = message.request_id;
            answer.add(message);
            if n == n_messages {
                let aborted = client.abort_request(AbortRequestRequest { request_id }).await;
                match aborted {
                    Err(status) if status.code() != Code::NotFound => return Err(broken(status)),
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// Many requests at once, more than the queue may take.
    async fn burst(&mut self) {
        let mut calls = JoinSet::new();
        for _ in 0..32 {
            let mut wish = self.shared.limits.valid(&mut self.rng);
            let sampling = wish.request.sampling.get_or_insert_default();
            sampling.n = Some(8);
            // Seeded outputs of one request have choices of their own.
            wish.repeated = None;
            let mut answer = Answer::new(&wish.request);
            let (shared, begun) = (Arc::clone(&self.shared), Instant::now());
            let mut client =
                Self { shared, rng: self.rng.clone(), connection: self.connection.clone() };
            calls.spawn(async move {
                let call = client.call("stream", &wish, None, &mut answer);
                let end = patient(client.shared.patience, call).await;
                client.settle("burst", &wish, &answer, (begun, end)).await;
            });
        }
        calls.join_all().await;
    }
}

/// The messages of a call that the server has taken, whose outputs have names from then on.
fn named(
    reply: Result<Response<Streaming<GenerateStreamResponse>>, Status>,
    answer: &mut Answer,
) -> Result<Streaming<GenerateStreamResponse>, Broken> {
    let reply = reply.map_err(|status| Broken { status, taken: false })?;
    answer.name(reply.metadata().get("tandem-request-ids").and_then(|ids| ids.to_str().ok()));
    Ok(reply.into_inner())
}

async fn connect(address: &str) -> Result<Connection, String> {
    Connection::open(address, None).await.map_err(|error| format!("cannot connect: {error:?}"))
}

/// A request with its `grpc-timeout`.
fn limited<T>(message: T, limit: Option<Duration>) -> Request<T> {
    let mut request = Request::new(message);
    if let Some(limit) = limit {
        request.set_timeout(limit);
    }
    request
}

/// The end of a call, which must come.
async fn patient(
    patience: Duration,
    call: impl Future<Output = Result<(), Broken>>,
) -> Result<(), Broken> {
    let silent = || Broken { status: Status::unknown("never answered"), taken: true };
    timeout(patience, call).await.unwrap_or_else(|_| Err(silent()))
}

/// Reads long streams far more slowly than they are made, one after the other.
pub(crate) async fn read_slowly(shared: Arc<Shared>) -> Result<(), String> {
    // Little may wait on the way, so that it waits in the server.
    let connection = Connection::open(&shared.address, Some(4096))
        .await
        .map_err(|error| format!("cannot connect: {error:?}"))?;
    while !shared.stops() {
        let mut request = shared.limits.endless(1);
        request.sampling.get_or_insert_default().logprobs = Some(20);
        let stream = connection.inference().generate_stream(request).await;
        let end = match stream {
            Ok(stream) => {
                let mut stream = stream.into_inner();
                loop {
                    sleep(Duration::from_millis(250)).await;
                    match stream.message().await {
                        Ok(Some(_)) if shared.stops() => break Ok("left"),
                        Ok(Some(_)) => {}
                        Ok(None) => break Ok("finished"),
                        Err(status) => break Err(status),
                    }
                }
            }
            Err(status) => Err(status),
        };
        let outcome = end.or_else(|status| {
            let info = status.get_details_error_info();
            match info.as_ref().map(|info| info.reason.as_str()) {
                Some("SLOW_READER") => Ok("too slow"),
                _ => shared.judge(&Broken { status, taken: false }, Instant::now()),
            }
        });
        if outcome == Ok("queue full") {
            sleep(Duration::from_secs(1)).await;
        }
        shared.tally().count("slow reader", outcome);
    }
    Ok(())
}
