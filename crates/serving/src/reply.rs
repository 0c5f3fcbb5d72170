//! Whole answers from the messages of a call.

use grpc_api::inference::v1 as pb;
use grpc_api::inference::v1::generate_stream_response::Event;
use tokio_stream::StreamExt as _;
use tonic::Status;

use crate::inference_engine::Messages;

/// Reads a call of `n_outputs` outputs to its end. Outputs have text where the model `has_text`.
///
/// # Errors
///
/// If the call fails, whatever it had said before.
pub async fn whole_reply(
    mut messages: Messages,
    n_outputs: u32,
    has_text: bool,
) -> Result<pb::GenerateResponse, Status> {
    let empty =
        pb::GeneratedOutput { text: has_text.then(String::new), ..pb::GeneratedOutput::default() };
    let mut reply =
        pb::GenerateResponse { outputs: vec![empty; n_outputs as usize], prompt_logprobs: vec![] };
    while let Some(message) = messages.next().await {
        add(&mut reply, message?);
    }
    Ok(reply)
}

/// Adds a message of a call to its reply, which so says the same as the messages.
fn add(reply: &mut pb::GenerateResponse, message: pb::GenerateStreamResponse) {
    let output = &mut reply.outputs[message.index as usize];
    output.request_id = message.request_id;
    match message.event {
        Some(Event::Delta(delta)) => {
            output.token_ids.extend(delta.token_ids);
            output.logprobs.extend(delta.logprobs);
            if let Some(text) = &mut output.text {
                text.extend(delta.text_pieces);
            }
        }
        Some(Event::PromptLogprobs(prompt)) => {
            reply.prompt_logprobs.extend(prompt.logprobs);
        }
        Some(Event::Finished(finished)) => {
            output.finish_reason = finished.finish_reason;
            output.matched_token_id = finished.matched_token_id;
            output.matched_stop_sequence = finished.matched_stop_sequence;
            output.matched_stop_text = finished.matched_stop_text;
            output.usage = finished.usage;
            output.speculation = finished.speculation;
            if let Some(text) = &mut output.text {
                text.push_str(&finished.tail_text);
            }
        }
        None => {}
    }
}
