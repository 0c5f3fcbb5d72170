//! Greedy choice and the verification of drafts against their definitions.

use anyhow::{Result, ensure};
use gpu_kernels::{AcceptedRuns, Sampling, Windows};
use gpu_runtime::Stream;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::batch::{Elem, normal, poisoned, upload};

pub(crate) fn check<E: Elem>(stream: &Stream) -> Result<()> {
    let sampling = Sampling::new::<E>(stream.gpu())?;
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    for (n_rows, vocab) in [(1, 1), (5, 1003), (65, 32_768), (3, 152_064), (577, 4096)] {
        check_argmax::<E, E>(stream, &sampling, &mut rng, (n_rows, vocab))?;
        check_argmax::<E, f32>(stream, &sampling, &mut rng, (n_rows, vocab))?;
    }
    for width in [1, 2, 4, 9] {
        for n_slots in [1, 14, 200] {
            check_verify(stream, &sampling, &mut rng, (n_slots, width))?;
        }
    }
    println!("sampler {:4} argmax and greedy verification: exact", E::NAME);
    Ok(())
}

fn check_argmax<E: Elem, L: Elem>(
    stream: &Stream,
    sampling: &Sampling,
    rng: &mut ChaCha8Rng,
    (n_rows, vocab): (usize, usize),
) -> Result<()> {
    let (gpu, poison) = (stream.gpu(), 0x7b7b_7b7b);
    // Steps of a half, so that maxima are often equal.
    let mut logits: Vec<L> =
        (0..n_rows * vocab).map(|_| L::of((normal(rng) * 2.0).round() / 2.0)).collect();
    let mut row_seq = vec![0; n_rows];
    for (row, logits) in logits.chunks_exact_mut(vocab).enumerate() {
        match row % 6 {
            1 => logits[rng.random_range(0..vocab)] = L::of(f32::NAN),
            2 => logits.fill(L::of(f32::NEG_INFINITY)),
            3 => logits.iter_mut().for_each(|x| *x = L::of(-0.0 * x.f32().signum())),
            4 => logits[rng.random_range(0..vocab)] = L::of(f32::INFINITY),
            5 => row_seq[row] = -1,
            _ => {}
        }
    }
    let want: Vec<i32> = logits.chunks_exact(vocab).map(argmax).collect();
    let mut scratch = poisoned::<u64>(gpu, stream, Sampling::scratch_len(n_rows, vocab), 0xff)?;
    for with_padding in [false, true] {
        let mut ids = poisoned::<i32>(gpu, stream, n_rows, 0x7b)?;
        let (logits, seqs) = (upload(stream, &logits)?, upload(stream, &row_seq)?);
        let seqs = with_padding.then(|| seqs.view());
        sampling.argmax(stream, logits.view(), seqs, scratch.view_mut(), ids.view_mut())?;
        for (row, got) in stream.download(&ids)?.into_iter().enumerate() {
            let want = if with_padding && row_seq[row] < 0 { poison } else { want[row] };
            ensure!(got == want, "row {row} of {n_rows} x {vocab}: {got}, not {want}");
        }
    }
    Ok(())
}

fn argmax<L: Elem>(logits: &[L]) -> i32 {
    let mut best = 0;
    for (id, logit) in logits.iter().enumerate() {
        if logit.f32().is_nan() {
            return -1;
        }
        if logit.f32() > logits[best].f32() {
            best = id;
        }
    }
    best as i32
}

/// The accepted run of a window, by its definition.
pub(crate) fn accepted_run(ids: &[i32], drafts: &[i32], forced: Option<i32>) -> Vec<i32> {
    let n_accepted = match forced {
        Some(forced) => forced.clamp(0, drafts.len() as i32) as usize,
        None => drafts.iter().zip(ids).take_while(|(draft, id)| draft == id).count(),
    };
    let mut run = drafts[..n_accepted].to_vec();
    run.push(ids[n_accepted]);
    if ids[n_accepted] < 0 { Vec::new() } else { run }
}

fn check_verify(
    stream: &Stream,
    sampling: &Sampling,
    rng: &mut ChaCha8Rng,
    (n_slots, width): (usize, usize),
) -> Result<()> {
    let gpu = stream.gpu();
    let k = width - 1;
    let mut id = || rng.random_range(0..3);
    let ids: Vec<i32> = (0..n_slots * width).map(|_| id()).collect();
    let mut drafts: Vec<i32> = (0..n_slots * k).map(|_| id()).collect();
    let mut ids = ids;
    for slot in 0..n_slots {
        // Every other window is mostly right.
        for i in 0..k * (slot % 2) {
            drafts[slot * k + i] = ids[slot * width + i];
        }
        if rng.random_range(0..8) == 0 {
            ids[slot * width + rng.random_range(0..width)] = -1;
        }
    }
    let n_drafts: Vec<i32> = (0..n_slots).map(|_| rng.random_range(-1..width as i32)).collect();
    let forced: Vec<i32> = (0..n_slots).map(|_| rng.random_range(-1..width as i32 + 1)).collect();
    let device = [&ids, &drafts, &n_drafts, &forced].map(|values| upload(stream, values));
    let [d_ids, d_drafts, d_n, d_forced] = device;
    let (d_ids, d_drafts, d_n, d_forced) = (d_ids?, d_drafts?, d_n?, d_forced?);
    for is_forced in [false, true] {
        let mut emitted = poisoned::<i32>(gpu, stream, n_slots * width, 0x7b)?;
        let mut n_emitted = poisoned::<i32>(gpu, stream, n_slots, 0x7b)?;
        let mut last_row = poisoned::<i32>(gpu, stream, n_slots, 0x7b)?;
        let windows = Windows {
            ids: d_ids.view(),
            drafts: d_drafts.view(),
            n_drafts: d_n.view(),
            forced: is_forced.then(|| d_forced.view()),
        };
        let out = AcceptedRuns {
            emitted: emitted.view_mut(),
            n_emitted: n_emitted.view_mut(),
            last_row: last_row.view_mut(),
        };
        sampling.verify(stream, &windows, out)?;
        let emitted = stream.download(&emitted)?;
        let (n_emitted, last_row) = (stream.download(&n_emitted)?, stream.download(&last_row)?);
        for slot in 0..n_slots {
            let mut run = Vec::new();
            if let Ok(n) = usize::try_from(n_drafts[slot]) {
                let drafts = &drafts[slot * k..][..n];
                run = accepted_run(&ids[slot * width..], drafts, is_forced.then(|| forced[slot]));
            }
            let n = run.len() as i32;
            let last = if n > 0 { (slot * width) as i32 + n - 1 } else { -1 };
            run.resize(width, -1);
            let same = emitted[slot * width..][..width] == run && n_emitted[slot] == n;
            ensure!(same && last_row[slot] == last, "the run of slot {slot}, width {width}");
        }
    }
    Ok(())
}
