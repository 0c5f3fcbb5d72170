//! The dashboard of `docs/grafana` asks for metrics that exist.

use admin_http::{HttpConfig, Names};
use serde_json::Value;

use crate::harness::*;

const DASHBOARD: &str = include_str!("../../../../docs/grafana/tandem.json");

/// Every expression in a dashboard, at any depth.
fn expressions<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
    match value {
        Value::Object(fields) => {
            let own = ["expr", "query"].iter().filter_map(|key| fields.get(*key)?.as_str());
            found.extend(own);
            fields.values().for_each(|value| expressions(value, found));
        }
        Value::Array(values) => values.iter().for_each(|value| expressions(value, found)),
        _ => {}
    }
}

#[tokio::test]
async fn every_metric_of_the_dashboard_exists() {
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let mut found = vec![];
    expressions(&dashboard, &mut found);
    let setup = Setup { index_topk: 8, ..Setup::default() };
    let server = Server::start_with(Names::Own, HttpConfig::default(), setup).await;
    server.metrics_of_a_refusal().await;
    let scraped = server.scrape().await;
    let names = scraped.names();
    let mut n_names = 0;
    for expression in &found {
        let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        for name in words.filter(|word| word.starts_with("tandem_")) {
            assert!(names.contains(name), "{name} in {expression}");
            n_names += 1;
        }
    }
    assert!(found.len() > 15 && n_names >= found.len() - 2, "{found:?}");
}

impl Server {
    /// Refuses a request, since a code has no series before its first one.
    async fn metrics_of_a_refusal(&self) {
        use serving::{CallContext, InferenceEngine as _};
        let empty = streaming(&[], 1);
        assert!(self.of.frontend.generate(CallContext::default(), empty).await.is_err());
    }
}
