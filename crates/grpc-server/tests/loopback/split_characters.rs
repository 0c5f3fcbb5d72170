//! Fault case L20: characters whose bytes lie in several tokens, and ids that no token has.

use grpc_api::inference::v1::generate_stream_response::Event;
use grpc_api::inference::v1::{FinishReason, SpeculationParams};
use test_engine::Script;

use crate::harness::{Server, Setup, streaming, unary};

/// Rows of the embedding: more than the bundled tokenizer has ids.
const N_VOCAB: u32 = 4112;
/// Of the bundled tokenizer: `a`, the bytes F0 9F, 99 and 82, `b`, an id of the gap, ` import`.
const TOKENS: &[u32] = &[74, 676, 257, 234, 75, 4100, 448];
/// The text of the first token, the first two, and so on.
const TEXTS: [&str; 7] = ["a", "a\u{fffd}", "a\u{fffd}", "a🙂", "a🙂b", "a🙂b", "a🙂b import"];

#[tokio::test]
async fn deltas_have_whole_characters_and_add_up_wherever_the_output_is_cut() {
    let mut setup = Setup { tokenizer: true, ..Setup::default() };
    setup.limits.vocab_size = N_VOCAB;
    setup.limits.max_num_speculative_tokens = 7;
    let script = Script::fixed(N_VOCAB as usize, 1, TOKENS);
    let server = Server::start(Setup { script: Some(script), ..setup }).await;
    for (n_tokens, text) in (1..).zip(TEXTS) {
        for k in [0, 1, 2, 7] {
            let speculation = Some(SpeculationParams { num_speculative_tokens: Some(k) });
            let mut request = streaming(&[74], n_tokens);
            request.speculation = speculation;
            let mut stream = server.client().generate_stream(request).await.unwrap().into_inner();
            let (mut ids, mut pieces) = (vec![], vec![]);
            let finished = loop {
                match stream.message().await.unwrap().unwrap().event.unwrap() {
                    Event::Delta(delta) => {
                        ids.extend(delta.token_ids);
                        pieces.extend(delta.text_pieces);
                    }
                    Event::Finished(finished) => break finished,
                    other @ Event::PromptLogprobs(_) => panic!("{other:?}"),
                }
            };
            assert_eq!(ids, TOKENS[..n_tokens as usize], "k = {k}");
            assert_eq!(finished.finish_reason(), FinishReason::MaxTokens);
            assert!(!pieces.concat().contains('\u{fffd}'), "k = {k}: {pieces:?}");
            assert_eq!(pieces.concat() + &finished.tail_text, text, "k = {k}");

            let mut request = unary(&[74], n_tokens);
            request.speculation = speculation;
            let reply = server.generate(request).await;
            assert_eq!((reply.token_ids.as_slice(), reply.text.as_deref()), (&*ids, Some(text)));
        }
    }
    server.wait_until_empty().await;
}
