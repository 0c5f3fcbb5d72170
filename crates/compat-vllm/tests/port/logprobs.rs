//! Log probabilities, ranks and candidates.

use test_engine::Script;
use vllm_proto::candidate_tokens::Select;
use vllm_proto::{CandidateTokenInfo, CandidateTokens, DecodingParameters, ResponseOptions};

use crate::harness::{Server, TEXTS, request};

/// The lower the id, the likelier.
fn logits() -> Vec<f32> {
    TEXTS.iter().scan(3.0_f32, |logit, _| Some(std::mem::replace(logit, *logit - 0.25))).collect()
}

fn logprob(id: u32) -> f32 {
    let logits = logits();
    logits[id as usize] - logits.iter().map(|logit| logit.exp()).sum::<f32>().ln()
}

async fn server() -> Server {
    Server::scripted(Script::new(|_| logits(), |_| 0)).await
}

fn top_n(n: u32) -> Option<CandidateTokens> {
    Some(CandidateTokens { select: Some(Select::TopN(n)) })
}

fn ids_and_ranks(info: &CandidateTokenInfo) -> Vec<(u32, u32)> {
    let of_token = |token: &vllm_proto::candidate_token_info::TokenInfo| {
        assert!((token.logprob - logprob(token.id)).abs() < 1e-5);
        (token.id, token.rank)
    };
    info.tokens.iter().map(of_token).collect()
}

#[tokio::test]
async fn outputs_have_ranks_and_the_other_candidates() {
    let server = server().await;
    let asked = |n: Option<u32>, forced: u32| {
        let mut request = request(&[7], 3);
        // The model's own distribution is told, in which a forced token has its rank.
        request.decoding = Some(DecodingParameters {
            logit_bias: [(forced, 100.0)].into(),
            ..DecodingParameters::default()
        });
        request.stopping.as_mut().unwrap().ignore_eos = true;
        let response = request.response.as_mut().unwrap();
        response.output_logprobs = true;
        response.output_candidates = n.and_then(top_n);
        server.both(request)
    };
    for (n, forced, rank, others) in [
        (None, 0, 1, vec![]),
        (Some(0), 0, 1, vec![]),
        (Some(1), 0, 1, vec![]),
        (Some(3), 0, 1, vec![(1, 2), (2, 3)]),
        (Some(3), 2, 3, vec![(0, 1), (1, 2)]),
        (Some(2), 2, 0, vec![(0, 1), (1, 2)]),
        (None, 2, 0, vec![]),
    ] {
        let (_, output) = asked(n, forced).await;
        assert_eq!(output.token_ids, [forced; 3]);
        assert_eq!(output.ranks, [rank; 3], "{n:?} {forced}");
        assert_eq!(output.logprobs.len(), 3);
        assert!((output.logprobs[0] - logprob(forced)).abs() < 1e-5);
        let candidates: Vec<_> = output.candidate_tokens.iter().map(ids_and_ranks).collect();
        assert_eq!(candidates, [others.clone(), others.clone(), others]);
    }
    let (_, output) = server.both(request(&[7], 3)).await;
    assert!(output.logprobs.is_empty() && output.candidate_tokens.is_empty());
}

#[tokio::test]
async fn the_first_message_has_an_entry_for_each_token_of_the_prompt() {
    let server = server().await;
    let asked = |prompt: &[u32]| {
        let mut request = request(prompt, 2);
        request.stopping.as_mut().unwrap().ignore_eos = true;
        request.response = Some(ResponseOptions {
            prompt_logprobs: true,
            prompt_candidates: top_n(2),
            ..ResponseOptions::default()
        });
        server.both(request)
    };
    let (prompt, _) = asked(&[7, 1, 0, 5]).await;
    assert_eq!(prompt.ranks, [0, 2, 1, 0]);
    assert_eq!(prompt.logprobs[0], 0.0);
    for (logprob, id) in prompt.logprobs[1..].iter().zip([1, 0, 5]) {
        assert!((logprob - self::logprob(id)).abs() < 1e-5);
    }
    let candidates: Vec<_> = prompt.candidate_tokens.iter().map(ids_and_ranks).collect();
    assert_eq!(candidates, [vec![], vec![(0, 1)], vec![(1, 2)], vec![(0, 1), (1, 2)]]);
    // Nothing comes before the only token.
    let (prompt, output) = asked(&[7]).await;
    assert_eq!((prompt.logprobs, output.num_tokens), (vec![0.0], 2));
    // Longer than what a step reads, and than what one message of the own API tells.
    let long: Vec<u32> = (0..3000).map(|idx| idx % 24).collect();
    let (prompt, _) = asked(&long).await;
    assert_eq!((prompt.logprobs.len(), prompt.candidate_tokens.len()), (3000, 3000));
}
