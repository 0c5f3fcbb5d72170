//! Vectorised rows against the scalar definitions, alone and in a batch, with every parameter.
#![expect(clippy::unwrap_used, reason = "a failure in a test's helper is a failure of the test")]

use sampler::noise::{self, Purpose};
use sampler::{
    Distribution, FaultCause, SamplingParams, SamplingRow, TokenHistory, oracle, sample,
};
use tch::{Kind, Tensor};

/// Numbers for test inputs.
struct Rng(u64);

impl Rng {
    fn uniform(&mut self) -> f64 {
        self.0 += 1;
        noise::uniform(0x7E57, self.0, Purpose::Sample)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.uniform() * n as f64) as usize
    }

    fn range(&mut self, low: f64, high: f64) -> f32 {
        (low + (high - low) * self.uniform()) as f32
    }

    fn ids(&mut self, n: usize, vocab: usize) -> Vec<u32> {
        (0..n).map(|_| self.below(vocab) as u32).collect()
    }

    fn maybe<T>(&mut self, value: impl FnOnce(&mut Self) -> T) -> Option<T> {
        (self.below(2) == 0).then(|| value(self))
    }
}

/// A request with its history and a window of drafts.
struct Request {
    params: SamplingParams,
    history: TokenHistory,
    drafts: Vec<u32>,
    grammar: Option<Vec<u32>>,
}

impl Request {
    /// A value of few steps each, so that ties are common.
    fn random(rng: &mut Rng, vocab: usize) -> Self {
        let params = SamplingParams {
            temperature: rng.range(0.2, 2.0),
            top_k: rng.maybe(|rng| rng.below(vocab + 3) as u32).unwrap_or(0),
            top_p: rng.maybe(|rng| rng.range(0.05, 1.0)).unwrap_or(1.0),
            min_p: rng.maybe(|rng| rng.range(0.0, 0.4)).unwrap_or(0.0),
            presence_penalty: rng.maybe(|rng| rng.range(-1.0, 1.0)).unwrap_or(0.0),
            frequency_penalty: rng.maybe(|rng| rng.range(-1.0, 1.0)).unwrap_or(0.0),
            repetition_penalty: rng.maybe(|rng| rng.range(0.7, 1.6)).unwrap_or(1.0),
            logit_bias: rng.maybe(|rng| vec![(rng.below(vocab) as u32, 2.5)]).unwrap_or_default(),
            bad_words: rng
                .maybe(|rng| vec![rng.ids(1, vocab), rng.ids(2, vocab), rng.ids(3, vocab)])
                .unwrap_or_default(),
            allowed_token_ids: rng.maybe(|rng| rng.ids(1 + vocab / 2, vocab)),
            min_tokens: rng.below(8) as u32,
            end_ids: vec![0],
            seed: rng.below(1000) as u64,
        };
        params.check(vocab as u32).unwrap();
        let mut history = TokenHistory::new(&rng.ids(3, vocab));
        let generated = rng.below(5);
        history.extend(&rng.ids(generated, vocab));
        let n_drafts = rng.below(4);
        let drafts = rng.ids(n_drafts, vocab);
        let grammar = rng.maybe(|rng| {
            (0..vocab.div_ceil(32)).map(|_| (rng.uniform() * (1u64 << 32) as f64) as u32).collect()
        });
        Self { params, history, drafts, grammar }
    }

    fn row(&self) -> SamplingRow<'_> {
        SamplingRow {
            params: &self.params,
            history: &self.history,
            drafts: &self.drafts,
            position: (self.history.tokens().len() + self.drafts.len()) as u64,
            grammar_mask: self.grammar.as_deref(),
        }
    }

    /// Whether a token is left. What no token is left of, the oracle has no word for.
    fn has_token(&self, logits: &[f32]) -> bool {
        oracle::process(logits, &self.row()).iter().any(|logit| logit.is_finite())
    }
}

fn random_logits(rng: &mut Rng, vocab: usize) -> Vec<f32> {
    (0..vocab).map(|_| rng.range(-4.0, 4.0)).collect()
}

fn tensor(rows: &[Vec<f32>]) -> Tensor {
    Tensor::from_slice2(rows)
}

fn to_rows(tensor: &Tensor) -> Vec<Vec<f64>> {
    Vec::<Vec<f64>>::try_from(tensor).unwrap()
}

/// `n` requests with logits that leave them a token.
fn batch(rng: &mut Rng, n: usize, vocab: usize) -> (Vec<Request>, Vec<Vec<f32>>) {
    let mut requests = Vec::new();
    let mut logits = Vec::new();
    while requests.len() < n {
        let (request, row) = (Request::random(rng, vocab), random_logits(rng, vocab));
        if request.has_token(&row) {
            requests.push(request);
            logits.push(row);
        }
    }
    (requests, logits)
}

/// 600 random rows; sizes that are and are not whole vectors, words and bytes.
#[test]
fn distributions_equal_the_scalar_definition() {
    let mut rng = Rng(1);
    for vocab in [4, 7, 32, 33, 100, 500] {
        let (requests, logits) = batch(&mut rng, 100, vocab);
        let rows: Vec<SamplingRow<'_>> = requests.iter().map(Request::row).collect();
        let distribution = Distribution::new(&tensor(&logits), &rows).unwrap();
        let codes = Vec::<i64>::try_from(distribution.codes()).unwrap();
        assert!(codes.iter().all(|&code| code == 0));
        for ((probs, row), logits) in to_rows(distribution.probs()).iter().zip(&rows).zip(&logits) {
            let expected = oracle::distribution(logits, row);
            for (got, expected) in probs.iter().zip(&expected) {
                assert!((got - expected).abs() < 1e-6, "{probs:?} {expected:?} {row:?}");
            }
        }
        let ids = sample(&tensor(&logits), &rows, Purpose::Draft).unwrap().ids;
        for ((id, row), logits) in ids.iter().zip(&rows).zip(&logits) {
            let uniform = noise::uniform(row.params.seed, row.position, Purpose::Draft);
            assert_eq!(*id, Ok(oracle::choose(&oracle::distribution(logits, row), uniform)));
        }
    }
}

/// Every bit, with batch mates of every kind, among them one whose logits are not numbers.
#[test]
fn a_row_has_the_same_bits_alone_and_in_a_batch() {
    let mut rng = Rng(2);
    for vocab in [5, 31, 333, 4099, 40_001] {
        let (mut requests, mut logits) = batch(&mut rng, 11, vocab);
        // Open rows: the nucleus is wider than the candidates.
        for request in &mut requests[..3] {
            request.params.top_k = 0;
            request.params.top_p = 0.97;
            request.params.min_p = 0.0;
        }
        logits[5].fill(f32::NAN);
        let rows: Vec<SamplingRow<'_>> = requests.iter().map(Request::row).collect();
        let together = Distribution::new(&tensor(&logits), &rows).unwrap();
        let chosen =
            Vec::<i64>::try_from(together.sample(&rows, Purpose::Sample).unwrap()).unwrap();
        for (row_idx, (row, logits)) in rows.iter().zip(&logits).enumerate() {
            let alone = Distribution::new(&tensor(std::slice::from_ref(logits)), &[*row]).unwrap();
            let of_row = together.probs().narrow(0, row_idx as i64, 1);
            let bits = |probs: &Tensor| to_rows(probs)[0].iter().map(|p| p.to_bits()).collect();
            let (alone_bits, bits): (Vec<u64>, Vec<u64>) = (bits(alone.probs()), bits(&of_row));
            assert_eq!(alone_bits, bits, "row {row_idx} of vocabulary {vocab}");
            let choice = alone.sample(&[*row], Purpose::Sample).unwrap().int64_value(&[0]);
            assert_eq!((choice, choice < 0), (chosen[row_idx], row_idx == 5));
        }
    }
}

/// Rows whose kept tokens end within, at and behind the candidates that are ranked first.
#[test]
fn wide_sets_are_ranked_in_full() {
    let mut rng = Rng(3);
    let vocab = 3000;
    let settings =
        [(0, 0.5), (0, 0.999), (1023, 1.0), (1024, 0.9), (1025, 0.9), (2500, 0.99), (2, 0.3)];
    let params: Vec<SamplingParams> = settings
        .iter()
        .map(|&(top_k, top_p)| SamplingParams {
            temperature: 3.0,
            top_k,
            top_p,
            ..SamplingParams::default()
        })
        .collect();
    let history = TokenHistory::default();
    let rows: Vec<SamplingRow<'_>> = params.iter().map(|params| plain(params, &history)).collect();
    // Few distinct logits: the edge of every set lies among equal ones.
    let logits: Vec<Vec<f32>> = (0..rows.len())
        .map(|_| random_logits(&mut rng, vocab).iter().map(|x| (x * 4.0).round() / 4.0).collect())
        .collect();
    let distribution = Distribution::new(&tensor(&logits), &rows).unwrap();
    let mut sizes = Vec::new();
    for ((probs, row), logits) in to_rows(distribution.probs()).iter().zip(&rows).zip(&logits) {
        let expected = oracle::distribution(logits, row);
        for (got, expected) in probs.iter().zip(&expected) {
            assert!((got - expected).abs() < 1e-9 && (*got > 0.0) == (*expected > 0.0));
        }
        sizes.push(probs.iter().filter(|&&p| p > 0.0).count());
    }
    assert_eq!((sizes[2], sizes[6]), (1023, 1), "{sizes:?}");
    assert!(sizes[1] > 1024 && sizes[5] > 1024 && sizes[0] < 1024, "{sizes:?}");
}

fn plain<'a>(params: &'a SamplingParams, history: &'a TokenHistory) -> SamplingRow<'a> {
    SamplingRow { params, history, drafts: &[], position: 0, grammar_mask: None }
}

#[test]
fn greedy_rows_take_the_largest_processed_logit() {
    let mut rng = Rng(4);
    for vocab in [4, 100] {
        let (mut requests, logits) = batch(&mut rng, 100, vocab);
        requests.iter_mut().for_each(|request| request.params.temperature = 0.0);
        let rows: Vec<SamplingRow<'_>> = requests.iter().map(Request::row).collect();
        let ids = sample(&tensor(&logits), &rows, Purpose::Sample).unwrap().ids;
        for ((id, row), logits) in ids.iter().zip(&rows).zip(&logits) {
            let expected = oracle::choose(&oracle::distribution(logits, row), 0.5);
            assert_eq!(*id, Ok(expected));
        }
    }
}

#[test]
fn top_k_of_one_is_greedy_also_among_equal_logits() {
    let logits = tensor(&[vec![0.0, 2.0, 2.0, 2.0], vec![1.0, 1.0, 1.0, 0.0]]);
    let (history, mut chosen) = (TokenHistory::default(), Vec::new());
    for seed in 0..50 {
        let params = SamplingParams { temperature: 1.0, top_k: 1, seed, ..Default::default() };
        let rows = [plain(&params, &history); 2];
        chosen.extend(sample(&logits, &rows, Purpose::Sample).unwrap().ids);
    }
    assert!(chosen.chunks(2).all(|ids| ids == [Ok(1), Ok(0)]));
}

/// A temperature that would overflow the logits, and one that levels them.
#[test]
fn extreme_temperatures_are_fine() {
    let history = TokenHistory::default();
    let logits = tensor(&[vec![80.0, 79.9, -80.0], vec![80.0, 79.9, -80.0]]);
    let [cold, hot] = [1e-40, 1e30]
        .map(|temperature| SamplingParams { temperature, ..SamplingParams::default() });
    cold.check(3).unwrap();
    let rows = [plain(&cold, &history), plain(&hot, &history)];
    let probs = to_rows(Distribution::new(&logits, &rows).unwrap().probs());
    assert_eq!(probs[0], [1.0, 0.0, 0.0]);
    assert!(probs[1].iter().all(|p| (p - 1.0 / 3.0).abs() < 1e-12));
}

#[test]
fn a_row_without_a_token_says_why_and_harms_no_other() {
    let history = TokenHistory::default();
    let temperature = SamplingParams { temperature: 1.0, ..SamplingParams::default() };
    let greedy = SamplingParams::default();
    let cornered = SamplingParams {
        allowed_token_ids: Some(vec![1]),
        min_tokens: 1,
        end_ids: vec![1],
        ..temperature.clone()
    };
    let row = |params| plain(params, &history);
    let forbidden = SamplingRow { grammar_mask: Some(&[]), ..row(&greedy) };
    let rows = [row(&temperature), row(&cornered), forbidden, row(&temperature), row(&greedy)];
    let rows = [&rows[..], &[row(&temperature), row(&greedy), row(&temperature)]].concat();
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let logits = tensor(&[
        vec![0.0, 50.0],
        vec![0.0, 1.0],
        vec![0.0, 1.0],
        vec![nan, 0.0],
        vec![0.0, nan],
        vec![inf, 0.0],
        vec![0.0, inf],
        vec![-inf, -inf],
    ]);
    let ids = sample(&logits, &rows, Purpose::Sample).unwrap().ids;
    let texts: Vec<String> =
        ids.iter().map(|id| id.as_ref().map_or_else(ToString::to_string, u32::to_string)).collect();
    assert_eq!(
        texts,
        [
            "1",
            "row 1 has no token left after min_tokens, allowed_token_ids",
            "row 2 has no token left after the grammar",
            "row 3 of the logits holds a NaN",
            "row 4 of the logits holds a NaN",
            "row 5 of the logits holds an infinity",
            "1",
            "row 7: every logit of the model is negative infinity",
        ]
    );
    assert_eq!(ids[3].as_ref().unwrap_err().cause, FaultCause::NotANumber);
}

/// Fault case L03: the rows of a window, and `min_tokens` that counts tokens, not steps.
#[test]
fn drafts_before_a_row_count_as_generated() {
    let penalised = SamplingParams { frequency_penalty: 0.5, ..SamplingParams::default() };
    let mut logits = vec![0.0; 10];
    (logits[7], logits[8]) = (3.0, 2.4);
    let history = TokenHistory::new(&[1]);
    let window = [7, 7, 7];
    let row = |at: usize| SamplingRow { drafts: &window[..at], ..plain(&penalised, &history) };
    let rows: Vec<SamplingRow<'_>> = (0..4).map(row).collect();
    let ids = sample(&tensor(&vec![logits; 4]), &rows, Purpose::Sample).unwrap().ids;
    assert_eq!(ids, [Ok(7), Ok(7), Ok(8), Ok(8)]);

    let short = SamplingParams { min_tokens: 5, end_ids: vec![2], ..SamplingParams::default() };
    let mut logits = vec![0.0; 10];
    (logits[2], logits[9]) = (3.0, 1.0);
    let mut history = TokenHistory::new(&[1]);
    history.extend(&[9, 9, 9]);
    let window = [9, 9, 9];
    let row = |at: usize| SamplingRow { drafts: &window[..at], ..plain(&short, &history) };
    let rows: Vec<SamplingRow<'_>> = (0..4).map(row).collect();
    let ids = sample(&tensor(&vec![logits; 4]), &rows, Purpose::Sample).unwrap().ids;
    assert_eq!(ids, [Ok(9), Ok(9), Ok(2), Ok(2)]);
}

/// Bad words end in history, in drafts and across both.
#[test]
fn bad_words_look_through_history_and_drafts() {
    let params = SamplingParams {
        bad_words: vec![vec![3], vec![5, 6, 0], vec![6, 7, 1], vec![7, 7, 2], vec![4, 4]],
        ..SamplingParams::default()
    };
    let mut history = TokenHistory::new(&[5]);
    history.extend(&[6]);
    let window = [7, 7];
    let forbidden = |at: usize| {
        let row = SamplingRow { drafts: &window[..at], ..plain(&params, &history) };
        let processed = sampler::process(&tensor(&[vec![0.0; 8]]), &[row]).unwrap();
        let excluded = processed.isinf().nonzero().select(1, 1);
        Vec::<i64>::try_from(excluded).unwrap()
    };
    assert_eq!(forbidden(0), [0, 3]);
    assert_eq!(forbidden(1), [1, 3]);
    assert_eq!(forbidden(2), [2, 3]);
}

#[test]
fn the_logits_are_left_alone_and_their_kind_does_not_matter() {
    let params =
        SamplingParams { temperature: 1.0, logit_bias: vec![(0, 1.0)], ..Default::default() };
    let history = TokenHistory::default();
    let rows = [plain(&params, &history)];
    let logits = tensor(&[vec![0.5, 1.5, -2.0]]);
    let before = logits.copy();
    let expected = Distribution::new(&logits, &rows).unwrap();
    assert_eq!(logits, before);
    let coarse = Distribution::new(&logits.to_kind(Kind::BFloat16), &rows).unwrap();
    assert_eq!(coarse.probs(), expected.probs());
}

#[test]
fn parameters_are_checked_by_name() {
    let neutral = SamplingParams::default();
    assert!(neutral.check(1).is_ok() && neutral.is_plain_greedy());
    let check = |change: &dyn Fn(&mut SamplingParams)| {
        let mut params = SamplingParams::default();
        change(&mut params);
        params.check(10).map_or_else(|error| error.to_string(), |()| "fine".to_owned())
    };
    assert_eq!(check(&|p| p.temperature = -1.0), "temperature is -1, below 0");
    assert_eq!(check(&|p| p.temperature = f32::NAN), "temperature is NaN, not a finite number");
    assert_eq!(check(&|p| p.top_p = 0.0), "top_p is 0, outside (0, 1]");
    assert_eq!(check(&|p| p.top_p = f32::NAN), "top_p is NaN, outside (0, 1]");
    assert_eq!(check(&|p| p.min_p = 1.5), "min_p is 1.5, outside [0, 1]");
    assert_eq!(check(&|p| p.repetition_penalty = 0.0), "repetition_penalty is 0, not above 0");
    let outside = "logit_bias holds token 10, outside the vocabulary of 10";
    assert_eq!(check(&|p| p.logit_bias = vec![(10, 1.0)]), outside);
    let twice = "logit_bias holds token 3 twice";
    assert_eq!(check(&|p| p.logit_bias = vec![(3, 1.0), (3, 2.0)]), twice);
    assert_eq!(check(&|p| p.bad_words = vec![vec![]]), "bad_words holds an empty sequence");
    assert_eq!(check(&|p| p.allowed_token_ids = Some(vec![])), "allowed_token_ids is empty");
    assert_eq!(check(&|p| p.top_k = u32::MAX), "fine");
}
