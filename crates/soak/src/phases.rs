//! A run: load, departures all at once, the server's end.

use std::fs;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::client::{Client, Shared, read_slowly};
use crate::connection::Connection;
use crate::rng::Rng;
use crate::sample::{Samples, is_empty, stats};

/// Times that all clients leave at once.
const N_DEPARTURES: usize = 10;

/// Clients of all kinds for a while, then until each has what it asked for.
pub(crate) async fn load(
    shared: &Arc<Shared>,
    (n_clients, seed): (u32, u64),
    (time, pid): (Duration, Option<u32>),
) -> Result<Samples, String> {
    let mut clients = JoinSet::new();
    for idx in 0..n_clients {
        clients.spawn(Client::open(shared, Rng::new(seed, idx.into())).await?.run());
    }
    let slow = tokio::spawn(read_slowly(Arc::clone(shared)));
    let mut samples = Samples::default();
    if let Ok(fault) = timeout(time, samples.take(&shared.control, pid)).await {
        return Err(fault);
    }
    shared.stop.store(true, Ordering::Relaxed);
    let ends = async {
        clients.join_all().await;
        slow.await.unwrap_or_else(|error| Err(error.to_string()))
    };
    timeout(2 * shared.patience, ends).await.map_err(|_| "a client never ends".to_owned())??;
    wait_until_empty(shared).await?;
    Ok(samples)
}

/// Waits until the engine holds nothing and returns how long that took.
async fn wait_until_empty(shared: &Shared) -> Result<Duration, String> {
    let start = Instant::now();
    loop {
        let stats = stats(&shared.control).await?;
        if is_empty(&stats) {
            return Ok(start.elapsed());
        }
        if start.elapsed() > shared.patience {
            return Err(format!("the engine still holds something: {stats:?}"));
        }
        sleep(Duration::from_millis(2)).await;
    }
}

/// Lets clients with long requests leave all at once, by call and by connection in turns. Returns
/// how long the engine took each time to be empty, in milliseconds.
pub(crate) async fn departures(shared: &Shared, n_clients: u32) -> Result<Vec<f64>, String> {
    let mut times = vec![];
    for turn in 0..N_DEPARTURES {
        let (mut connections, mut streams) = (vec![], vec![]);
        for _ in 0..n_clients {
            let connection = Connection::open(&shared.address, None)
                .await
                .map_err(|error| format!("cannot connect: {error:?}"))?;
            let stream = connection.inference().generate_stream(shared.limits.endless(1)).await;
            streams.push(stream.map_err(|status| format!("not taken: {status:?}"))?);
            connections.push(connection);
        }
        if turn % 2 == 0 {
            drop(streams);
        } else {
            connections.into_iter().for_each(Connection::cut);
        }
        times.push(wait_until_empty(shared).await?.as_secs_f64() * 1e3);
    }
    Ok(times)
}

/// Tells the server to stop under load, and checks what it has promised. Returns how long it took
/// to end, in seconds.
pub(crate) async fn terminate(
    shared: &Arc<Shared>,
    (n_clients, seed): (u32, u64),
    pid: u32,
) -> Result<f64, String> {
    let mut clients = JoinSet::new();
    for idx in 0..n_clients {
        let rng = Rng::new(seed, u64::from(idx) + 1_000_000);
        clients.spawn(Client::open(shared, rng).await?.run_until_refused());
    }
    // With its load, whatever the time that takes.
    let loaded = async {
        loop {
            let stats = stats(&shared.control).await?;
            if stats.running_requests + stats.waiting_requests >= n_clients / 2 {
                return Ok::<_, String>(());
            }
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(shared.patience, loaded).await.map_err(|_| "no load".to_owned())??;
    let mut health = HealthClient::new(shared.control.channel());
    let _ = shared.signalled.set(Instant::now());
    let signal = Command::new("kill").args(["-TERM", &pid.to_string()]).status();
    if !signal.is_ok_and(|status| status.success()) {
        return Err(format!("cannot signal process {pid}"));
    }
    let start = Instant::now();
    loop {
        let request = HealthCheckRequest { service: String::new() };
        let answer = health.check(request).await.map_err(|status| format!("{status:?}"))?;
        match answer.into_inner().status() {
            ServingStatus::NotServing => break,
            // The signal is on its way.
            ServingStatus::Serving if start.elapsed() < shared.patience => {}
            other => return Err(format!("health is {other:?} after the signal")),
        }
        sleep(Duration::from_millis(5)).await;
    }
    let ends = async { clients.join_all().await };
    timeout(2 * shared.patience, ends).await.map_err(|_| "a client never ends".to_owned())?;
    while is_running(pid) {
        if start.elapsed() > shared.drain_timeout + shared.patience {
            return Err("the server does not end".to_owned());
        }
        sleep(Duration::from_millis(20)).await;
    }
    Ok(start.elapsed().as_secs_f64())
}

/// Whether a process exists and has not ended; one that nobody has waited for has.
fn is_running(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}
