//! Behaviours of the *reference*, an engine of the same kind (ROCm/ATOM, commit `ffdf3bb5d`), that
//! ours shares, and those in which it differs on purpose. Numbers are those of the behavioural
//! specification. The tests drive a scheduler in both output modes through its public interface;
//! where ours differs, the test says why. Tests of other crates are named with the crate. At last
//! the same rig runs random commands (`machine`).
//!
//! | number | behaviour | test, or why there is none |
//! |---|---|---|
//! | 1.8 | deferred output with k = 3 and 0 | `trace::three_drafts*`, `trace::no_drafts` |
//! | D3 | `max_tokens` inside a run | `trace::a_limit_inside*` |
//! | D4 | drafts with immediate output | `trace::both_modes*` |
//! | 1.9, D5 | the first end of a run | `ends::the_first_end*`, `commit_model` |
//! | 1.10, D1, D2 | preemption and return | `preemption` |
//! | 11.1 | the prompt is a copy | a request owns its prompt |
//! | 11.1 | ids | given by the caller: `engine: ids_are_unique*` |
//! | 11.1 | blocks for tokens | `requests::blocks_are*`, `requests::the_fifth*` |
//! | 11.1 | completion and count | `requests::a_completion*` |
//! | 11.1 | exit sentinel | stopping is a phase of the engine, not a request |
//! | 11.1 | siblings; n = 0, -1 | `requests::siblings*`; `grpc-server: sampling_is*` |
//! | 11.1 | defaults | the service's: `grpc-server: text_is_tokenized*` |
//! | 11.1 | reasons; empty outputs | `ends`; none is empty: `requests::an_empty*` |
//! | 11.2 | counts of requests | `basics::requests_wait*` |
//! | 11.2 | requests and blocks limit admission | `basics::the_number*` |
//! | 11.2 | chunks by budget and threshold | `basics::chunks*`, `*::a_prompt*`, `*::long*` |
//! | 11.2 | chunking off | chunking is always on |
//! | 11.2 | decode behind prefill | `basics::one_token*` |
//! | 11.2 | who is preempted, and waits where | `preemption::of_two*`, `*::who_was*` |
//! | 11.2 | unschedulable prompts | refused at once: `basics::what_can*` |
//! | 11.2 | next batch, waiting tokens, age | prefill is never delayed, nobody asks |
//! | 11.3 | what is shared, and when | `prefix` |
//! | 11.4 | reasons, counts, rates | `ends` |
//! | 11.4 | blocks kept for a connector | no connector |
//! | 11.5 | first verify row; rows without drafts | `batches::the_first*`, `*::rows_without*` |
//! | 11.5 | partial prefills go to the tail | they keep their rank: `batches::a_partly*` |
//! | 11.5 | largest verify batch | `batches::the_budget*` |
//! | 11.5 | sums over query lengths | nobody asks |
//! | 11.5 | remote KV, prefills apart | one engine does both |
//! | 11.8 | queue of accepted counts | there is none: `speculation::middle*` |
//! | 11.8 | tokens of rows in flight | `speculation::rows_continue*` |
//! | 11.8 | index sharing | `spec-decode: four_gates*`, `attention-backends: the_rows*` |
//! | 11.8 | arguments | `server: bad_flags*` |
//! | 11.8 | verify lengths by confidence | no such drafter |

mod basics;
mod batches;
mod ends;
mod machine;
mod model;
mod preemption;
mod prefix;
mod requests;
mod rig;
mod speculation;
mod trace;
