//! What is where.

use std::sync::Arc;

use axum::Router;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::header::{ACCEPT, CONTENT_TYPE};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{from_fn, map_response};
use axum::response::{IntoResponse, Json, Response};
use axum::routing::{get, post};
use serving::{EngineState, InferenceEngine};

use crate::metrics::{Format, Metrics};
use crate::serve::HttpConfig;
use crate::{generate, guard, page, stats};

/// What handlers share.
pub(crate) struct App {
    pub(crate) config: HttpConfig,
    pub(crate) engine: Arc<dyn InferenceEngine>,
    pub(crate) metrics: Arc<Metrics>,
}

/// All routes. Probes and scrapes may come under any name of this host; the rest may not.
pub(crate) fn router(
    config: HttpConfig,
    engine: Arc<dyn InferenceEngine>,
    metrics: Arc<Metrics>,
) -> Router {
    let body_limit = DefaultBodyLimit::max(config.max_body_bytes);
    let app = Arc::new(App { config, engine, metrics });
    Router::new()
        .route("/", get(page::html))
        .route("/page.js", get(page::script))
        .route("/page.css", get(page::style))
        .route("/api/stats", get(api_stats))
        .route("/api/generate", post(generate::generate))
        .route_layer(from_fn(guard::known_host))
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics_text))
        .layer(map_response(guard::security_headers))
        .layer(body_limit)
        .with_state(app)
}

async fn healthz(State(app): State<Arc<App>>) -> Response {
    match app.engine.state() {
        EngineState::Dead(fault) => unwell(&format!("the engine is dead: {fault}")),
        _ => "ok\n".into_response(),
    }
}

async fn readyz(State(app): State<Arc<App>>) -> Response {
    match app.engine.state() {
        EngineState::Serving => "ok\n".into_response(),
        EngineState::Loading => unwell("the model is being read"),
        EngineState::Draining => unwell("the server drains"),
        EngineState::Dead(fault) => unwell(&format!("the engine is dead: {fault}")),
    }
}

fn unwell(why: &str) -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")).into_response()
}

async fn metrics_text(State(app): State<Arc<App>>, headers: HeaderMap) -> Response {
    let accepted = headers.get(ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let is_open = accepted.contains("application/openmetrics-text");
    let format = if is_open { Format::OpenMetrics } else { Format::Prometheus };
    let text = app.metrics.render(&*app.engine, format);
    ([(CONTENT_TYPE, format.content_type())], text).into_response()
}

async fn api_stats(State(app): State<Arc<App>>) -> Json<serde_json::Value> {
    Json(stats::all(&*app.engine, app.config.prompts))
}
