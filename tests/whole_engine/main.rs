//! The whole engine: bundled checkpoints, runner, scheduler, engine thread, and the gRPC port.
//!
//! The tensors behind the tokens are compared with the reference by the tests of `models`
//! (hidden states, logits, drafts) and `model-runner` (log probabilities, whole and in chunks).

#![expect(clippy::unwrap_used, reason = "a failure in a test's helper is a failure of the test")]

/// Makes a test of a function of a checkpoint for each of the bundled ones.
macro_rules! on_both {
    ($name:ident) => {
        mod $name {
            use integration_tests::oracle::Checkpoint;

            #[test]
            fn tiny_dsv3() {
                super::$name(Checkpoint::TinyDsv3);
            }

            #[test]
            fn tiny_glm52() {
                super::$name(Checkpoint::TinyGlm52);
            }
        }
    };
    (async $name:ident) => {
        mod $name {
            use integration_tests::oracle::Checkpoint;

            #[tokio::test(flavor = "multi_thread")]
            async fn tiny_dsv3() {
                super::$name(Checkpoint::TinyDsv3).await;
            }

            #[tokio::test(flavor = "multi_thread")]
            async fn tiny_glm52() {
                super::$name(Checkpoint::TinyGlm52).await;
            }
        }
    };
}

mod bad_input;
mod coarse_numbers;
mod constrained;
mod deferred;
mod forks;
mod glm4_moe;
mod grpc;
mod index_share;
mod oracle_tokens;
mod prefix_cache;
mod seeded;
