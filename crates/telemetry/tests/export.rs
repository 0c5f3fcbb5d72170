//! A call's span at a collector.

use std::time::Duration;

use grpc_api::inference::v1::{SamplingParams, StoppingParams};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use serving::{CallContext, FrontendConfig, InferenceEngine as _, TraceContext, whole_reply};
use telemetry::{Collector, LogFormat};
use test_engine::{Setup, TestEngine, streaming};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";
const PATIENCE: Duration = Duration::from_secs(30);

/// Keeps what it is sent.
struct FakeCollector(mpsc::UnboundedSender<Span>);

#[tonic::async_trait]
impl TraceService for FakeCollector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        for of_resource in request.into_inner().resource_spans {
            for of_scope in of_resource.scope_spans {
                for span in of_scope.spans {
                    self.0.send(span).map_err(|_| Status::unavailable("nobody reads"))?;
                }
            }
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn attribute<'a>(span: &'a Span, key: &str) -> Option<&'a Value> {
    let found = span.attributes.iter().find(|attribute| attribute.key == key)?;
    found.value.as_ref()?.value.as_ref()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_is_a_span_below_its_callers_and_tells_no_text() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let (sender, mut spans) = mpsc::unbounded_channel();
    tokio::spawn(
        tonic::transport::Server::builder()
            .add_service(TraceServiceServer::new(FakeCollector(sender)))
            .serve_with_incoming(TcpListenerStream::new(listener)),
    );
    let collector = Collector { endpoint, service_name: "tandem".to_owned() };
    let export = telemetry::log_and_export("off", LogFormat::Json, &collector).unwrap();

    let link_span = Some(telemetry::link_span as serving::LinkSpan);
    let frontend = FrontendConfig { link_span, ..FrontendConfig::default() };
    let of = TestEngine::start(Setup { frontend, ..Setup::default() });
    let trace = TraceContext { traceparent: format!("00-{TRACE}-{PARENT}-01"), tracestate: None };
    let context = CallContext { trace: Some(trace), ..CallContext::default() };
    let mut request = streaming(&[31_337, 31_338], 5);
    request.sampling =
        Some(SamplingParams { temperature: Some(0.5), seed: Some(7), ..SamplingParams::default() });
    let messages = of.frontend.generate(context, request.clone()).await.unwrap();
    let reply = whole_reply(messages, 1, false).await.unwrap();
    assert_eq!(reply.outputs[0].token_ids.len(), 5);
    request.stopping = Some(StoppingParams { max_tokens: Some(0), ..StoppingParams::default() });
    assert!(of.frontend.generate(CallContext::default(), request).await.is_err());
    tokio::task::spawn_blocking(|| export.shut_down()).await.unwrap();

    let span = tokio::time::timeout(PATIENCE, spans.recv()).await.unwrap().unwrap();
    assert_eq!((hex(&span.trace_id), hex(&span.parent_span_id)), (TRACE.into(), PARENT.into()));
    let text = |value: &str| Some(Value::StringValue(value.to_owned()));
    for (key, value) in [
        ("gen_ai.operation.name", text("text_completion")),
        ("gen_ai.request.model", text("counting")),
        ("gen_ai.request.temperature", Some(Value::DoubleValue(0.5))),
        ("gen_ai.request.seed", Some(Value::IntValue(7))),
        ("gen_ai.request.max_tokens", Some(Value::IntValue(5))),
        ("gen_ai.response.finish_reasons", text("length")),
        ("gen_ai.usage.input_tokens", Some(Value::IntValue(2))),
        ("gen_ai.usage.output_tokens", Some(Value::IntValue(5))),
        ("error.type", None),
    ] {
        assert_eq!(attribute(&span, key), value.as_ref(), "{key}");
    }
    assert!(attribute(&span, "gen_ai.latency.time_to_first_token").is_some());
    assert!(!format!("{span:?}").contains("31337"), "{span:?}");

    let refused = tokio::time::timeout(PATIENCE, spans.recv()).await.unwrap().unwrap();
    assert_eq!(attribute(&refused, "error.type"), text("InvalidArgument").as_ref());
    assert!(refused.parent_span_id.is_empty());
}
