//! Random requests and mutated messages: each ends with an answer or a status, none with a panic.

use compat_smg::engine::generate_request::Input;
use compat_smg::engine::sampling_params::Constraint;
use compat_smg::engine::{
    ChoiceConstraint, GenerateRequest, GenerateResponse, SamplingParams, TokenizedInput,
};
use prost::Message as _;
use prost::bytes::BufMut as _;
use tonic::client::Grpc;
use tonic::codec::{Codec, EncodeBuf, Encoder};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::{Code, Request, Status};
use tonic_prost::{ProstCodec, ProstDecoder};

use crate::harness::{PATIENCE, Server, Setup, read, request};

const N_MESSAGES: u64 = 2000;

/// Sends bytes as they are.
#[derive(Default)]
struct Raw;

impl Encoder for Raw {
    type Item = Vec<u8>;
    type Error = Status;

    fn encode(&mut self, item: Vec<u8>, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put_slice(&item);
        Ok(())
    }
}

impl Codec for Raw {
    type Encode = Vec<u8>;
    type Decode = GenerateResponse;
    type Encoder = Self;
    type Decoder = ProstDecoder<GenerateResponse>;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<GenerateResponse, GenerateResponse>::default().decoder()
    }
}

/// A generator of numbers: splitmix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % n
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    fn small(&mut self) -> u32 {
        u32::try_from(self.below(40)).unwrap()
    }

    fn number(&mut self) -> f32 {
        // None whose products overflow: the scripted model computes plainly.
        const NUMBERS: [f32; 7] = [0.0, 0.5, 1.0, 1.5, -1.0, f32::NAN, f32::INFINITY];
        NUMBERS[self.below(7) as usize]
    }

    fn text(&mut self) -> String {
        const PARTS: [&str; 12] =
            ["a", "(", "|", "{", "\"", "é", "\\", "[0-9]", "start: ", "x", "*", ""];
        (0..self.below(4)).map(|_| PARTS[self.below(12) as usize]).collect()
    }

    fn constraint(&mut self) -> Option<Constraint> {
        let text = self.text();
        Some(match self.below(18) {
            0 => Constraint::JsonSchema(text),
            1 => Constraint::Regex(text),
            2 => Constraint::Grammar(text),
            3 => Constraint::JsonObject(true),
            4 => Constraint::Choice(ChoiceConstraint { choices: vec![text, self.text()] }),
            5 => Constraint::StructuralTag(text),
            _ => return None,
        })
    }

    /// Parameters of which each is usual, odd or wrong.
    fn params(&mut self) -> SamplingParams {
        let mut params = SamplingParams { max_tokens: Some(8), ..SamplingParams::default() };
        params.constraint = self.constraint();
        for _ in 0..self.below(4) {
            match self.below(14) {
                0 => params.temperature = Some(self.number()),
                1 => params.top_p = self.number(),
                2 => params.top_k = self.small(),
                3 => params.min_p = self.number(),
                4 => params.frequency_penalty = self.number(),
                5 => params.repetition_penalty = self.number(),
                6 => params.max_tokens = self.one_in(2).then(|| self.small()),
                // Both together may leave the model without a token to choose.
                7 if params.constraint.is_none() => params.min_tokens = self.small(),
                8 => params.stop = vec![self.text()],
                9 => params.stop_token_ids = vec![self.small()],
                10 => params.n = self.small() % 5,
                11 => params.logprobs = Some(self.small().cast_signed() - 2),
                12 => params.prompt_logprobs = Some(self.small().cast_signed() - 2),
                _ => params.logit_bias = [(self.small().cast_signed() - 2, self.number())].into(),
            }
        }
        params
    }

    fn request(&mut self, name: u64) -> GenerateRequest {
        let input_ids = (0..self.below(50)).map(|_| self.small()).collect();
        let tokenized = TokenizedInput { input_ids, ..TokenizedInput::default() };
        let input = match self.below(8) {
            0 => None,
            1 => Some(Input::Text(self.text())),
            _ => Some(Input::Tokenized(tokenized)),
        };
        GenerateRequest {
            request_id: name.to_string(),
            input,
            sampling_params: Some(self.params()),
            stream: self.one_in(2),
            ..GenerateRequest::default()
        }
    }

    /// Changes, cuts, doubles or adds bytes.
    fn mutate(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..=self.below(3) {
            let at = self.below(bytes.len() as u64 + 1) as usize;
            match self.below(5) {
                0 => bytes.truncate(at),
                1 => bytes.insert(at, self.below(256) as u8),
                2 => bytes.extend_from_within(at..),
                _ if at < bytes.len() => bytes[at] ^= 1 << self.below(8),
                _ => {}
            }
        }
    }
}

#[tokio::test]
async fn no_message_harms_the_engine() {
    let mut setup = Setup {
        tokenizer: true,
        eos_token_ids: &[1],
        step_time: std::time::Duration::ZERO,
        ..Setup::default()
    };
    (setup.limits.vocab_size, setup.limits.max_model_len) = (4096, 64);
    setup.script = Some(crate::harness::Script::fixed(4096, 1, &[9, 8, 7]));
    let server = Server::start(setup).await;
    let mut random = Random(1);
    let (mut n_answers, mut n_refusals) = (0, 0);
    for name in 0..N_MESSAGES {
        let mut bytes = random.request(name).encode_to_vec();
        if random.one_in(3) {
            random.mutate(&mut bytes);
        }
        let is_dropped = random.one_in(10);
        let mut grpc = Grpc::new(server.channel.clone());
        grpc.ready().await.unwrap();
        let path = PathAndQuery::from_static("/vllm.grpc.engine.VllmEngine/Generate");
        let call = async {
            let stream = grpc.server_streaming(Request::new(bytes.clone()), path, Raw).await?;
            if is_dropped { Ok(None) } else { read(stream.into_inner()).await.map(Some) }
        };
        match tokio::time::timeout(PATIENCE, call).await.expect("a call without an end") {
            Ok(Some(answer)) => {
                assert!(!answer.completes.is_empty(), "{bytes:?}");
                n_answers += 1;
            }
            Ok(None) => {}
            Err(status) => {
                // What is no message at all is INTERNAL; a panic would be UNKNOWN or a reset.
                let known = [Code::InvalidArgument, Code::Internal, Code::ResourceExhausted];
                assert!(known.contains(&status.code()), "{status:?} for {bytes:?}");
                let is_decoding = status.message().contains("decode");
                assert!(status.code() != Code::Internal || is_decoding, "{status:?}");
                n_refusals += 1;
            }
        }
    }
    assert!(n_answers > 300 && n_refusals > 300, "{n_answers} answers, {n_refusals} refusals");
    server.wait_until_empty().await;
    let answer = server.generate(request("after", &[1], 3)).await.unwrap();
    assert_eq!(answer.streamed(0), [9, 8, 7]);
}
