//! Log probabilities against plain loops.

use sampler::{LogprobsQuery, logprobs};
use tch::{Device, Kind, Tensor};

/// Fault case L05's logits: 1/6, 1/6, 1/2, 1/6.
#[test]
fn the_rows_asked_for_have_the_tokens_asked_for() {
    let row = [0.0, 0.0, 3f32.ln(), 0.0];
    let logits = Tensor::from_slice2(&[[9.0f32, 0.0, 0.0, 0.0], row, row]);
    let query = |row_idx, id, n_top| LogprobsQuery { row_idx, id, n_top };
    let answers = logprobs(&logits, &[query(2, 2, 2), query(1, 3, 0), query(1, 3, 9)]).unwrap();
    let close = |a: f32, p: f32| (a - p.ln()).abs() < 1e-6;
    assert!(close(answers[0].chosen, 0.5) && close(answers[1].chosen, 1.0 / 6.0));
    let ids = |at: usize| answers[at].top.iter().map(|&(id, _)| id).collect::<Vec<u32>>();
    assert_eq!((ids(0), ids(1), ids(2)), (vec![2, 0], vec![], vec![2, 0, 1, 3]));
    assert!(close(answers[0].top[0].1, 0.5) && close(answers[0].top[1].1, 1.0 / 6.0));
    assert_eq!(logprobs(&logits, &[]).unwrap(), []);
    assert!(logprobs(&logits, &[query(0, 4, 1)]).is_err());
}

/// Coarse logits, so that ties are common, and each row alone for the same bits.
#[test]
fn values_equal_a_plain_log_softmax_and_no_batch_mate_matters() {
    tch::manual_seed(5);
    for (vocab, kind) in [(3, Kind::Float), (517, Kind::BFloat16), (20_011, Kind::Float)] {
        let logits = (Tensor::randn([6, vocab], (Kind::Float, Device::Cpu)) * 8.0).round() / 4.0;
        let rows = Vec::<Vec<f32>>::try_from(&logits).unwrap();
        let logits = logits.to_kind(kind);
        let queries: Vec<LogprobsQuery> = (0..6)
            .map(|row| LogprobsQuery { row_idx: 5 - row, id: row as u32 % 3, n_top: 20 })
            .collect();
        let answers = logprobs(&logits, &queries).unwrap();
        for (query, answer) in queries.iter().zip(&answers) {
            let row = &rows[query.row_idx];
            let sum: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
            let of = |id: u32| f64::from(row[id as usize]) - sum.ln();
            let mut ranked: Vec<u32> = (0..vocab as u32).collect();
            ranked.sort_by(|&a, &b| of(b).total_cmp(&of(a)).then(a.cmp(&b)));
            ranked.truncate(20);
            assert_eq!(answer.top.iter().map(|&(id, _)| id).collect::<Vec<_>>(), ranked);
            let pairs = answer.top.iter().copied().chain([(query.id, answer.chosen)]);
            for (id, value) in pairs {
                assert!((f64::from(value) - of(id)).abs() < 1e-5, "{value} and {}", of(id));
            }
            assert_eq!(logprobs(&logits, &[*query]).unwrap(), std::slice::from_ref(answer));
        }
    }
}
