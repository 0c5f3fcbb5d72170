//! Requests and configurations that are refused.

use engine_types::{Request, RequestId};

use super::support::{Rig, config, limits, request};
use crate::{ConfigError, Scheduler, SubmitError};

fn refused(change: impl FnOnce(&mut Request)) -> SubmitError {
    let mut scheduler = Scheduler::new(config(3), limits(4, 8)).unwrap();
    let mut request = request(1, 4, 4);
    change(&mut request);
    let error = scheduler.submit(request).unwrap_err();
    assert!(scheduler.is_idle());
    error
}

#[test]
fn each_refusal_names_its_field() {
    let vocab = |field, id| SubmitError::TokenOutsideVocab { field, id, vocab_size: 1000 };
    assert_eq!(refused(|r| r.prompt.clear()), SubmitError::EmptyPrompt);
    assert_eq!(refused(|r| r.prompt[2] = 1000), vocab("prompt", 1000));
    assert_eq!(refused(|r| r.params.stop_token_ids = vec![1, 4000]), vocab("stop_token_ids", 4000));
    let stops = vec![vec![1], vec![5, 1001]];
    assert_eq!(refused(|r| r.params.stop_sequences = stops), vocab("stop_sequences", 1001));
    assert_eq!(refused(|r| r.params.max_tokens = 0), SubmitError::ZeroMaxTokens);
    let stops = vec![vec![1], vec![]];
    let error = refused(|r| r.params.stop_sequences = stops);
    assert_eq!(error, SubmitError::EmptyStopSequence { index: 1 });
    let error = refused(|r| r.params.num_speculative_tokens = Some(4));
    assert_eq!(error, SubmitError::TooManySpeculativeTokens { value: 4, max: 3 });
    assert!(error.to_string().starts_with("num_speculative_tokens:"), "{error}");
    assert_eq!(refused(|r| r.cache_salt = Some(vec![])), SubmitError::EmptyCacheSalt);
    let error = refused(|r| r.cache_salt = Some(vec![1; 257]));
    assert_eq!(error, SubmitError::CacheSaltTooLong { n_bytes: 257, max: 256 });
    assert!(error.to_string().starts_with("cache_salt:"), "{error}");
    let error = refused(|r| r.prompt = vec![1; 64]);
    assert_eq!(error, SubmitError::PromptTooLong { n_tokens: 64, max_model_len: 64 });
    let error = refused(|r| r.prompt = vec![1; 32]);
    assert_eq!(error, SubmitError::NeverFits { n_tokens: 32, pool_tokens: 32 });
}

#[test]
fn an_id_is_taken_until_its_request_ends() {
    let mut rig = Rig::new(config(0), limits(4, 8));
    rig.submit(1, 4, 1);
    let again = rig.scheduler.submit(request(1, 4, 1));
    assert_eq!(again, Err(SubmitError::DuplicateId(RequestId(1))));
    rig.drain();
    rig.submit(1, 4, 1);
}

#[test]
fn contradictory_configurations_are_refused() {
    let new = |config, limits| Scheduler::new(config, limits).map(|_| ());
    let mut zero = config(0);
    zero.max_num_seqs = 0;
    let error = ConfigError::Zero { field: "max_num_seqs" };
    assert_eq!(new(zero, limits(4, 8)), Err(error));
    let error = ConfigError::Zero { field: "limits.num_blocks" };
    assert_eq!(new(config(0), limits(4, 0)), Err(error));
    let mut eos = config(0);
    eos.eos_token_ids = vec![2, 1000];
    let error = ConfigError::EosOutsideVocab { id: 1000, vocab_size: 1000 };
    assert_eq!(new(eos, limits(4, 8)), Err(error));
    let mut short = limits(4, 8);
    short.max_model_len = 1;
    assert_eq!(new(config(0), short), Err(ConfigError::ModelTooShort { max_model_len: 1 }));
}
