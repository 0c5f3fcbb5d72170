//! Which keys the target and each draft step attend, with and without index sharing.

use std::sync::Mutex;

use attention_backends::{GqaQuery, IndexQuery, MlaQuery, Selection};
use engine_types::TokenId;
use spec_decode::{DraftSeq, EagleProposer, Proposal};
use torch_ext::TensorError;

use super::made::checkpoint_of;
use super::*;

/// The fused backend, which notes the keys that the rows of each attention call attend.
#[derive(Default)]
struct Recorder {
    attended: Mutex<Vec<Vec<Vec<i32>>>>,
}

impl Recorder {
    /// The calls since the last look, each a list of rows.
    fn take(&self) -> Vec<Vec<Vec<i32>>> {
        std::mem::take(&mut self.attended.lock().unwrap())
    }
}

impl AttentionBackend for Recorder {
    fn name(&self) -> &'static str {
        "recorder"
    }

    fn write_latent(
        &self,
        cache: &Tensor,
        latent: &Tensor,
        k_pe: &Tensor,
        layout: &DeviceLayout,
    ) -> Result<(), TensorError> {
        CpuBackend.write_latent(cache, latent, k_pe, layout)
    }

    fn mla(
        &self,
        query: MlaQuery<'_>,
        cache: &Tensor,
        layout: &DeviceLayout,
    ) -> Result<Tensor, TensorError> {
        let selection = query.selection.expect("attention of these models is sparse");
        self.attended.lock().unwrap().push(selection.to_rows()?);
        CpuBackend.mla(query, cache, layout)
    }

    fn write_kv(
        &self,
        _cache: &Tensor,
        _k: &Tensor,
        _v: &Tensor,
        _layout: &DeviceLayout,
    ) -> Result<(), TensorError> {
        unreachable!("attention of these models is latent")
    }

    fn gqa(
        &self,
        _query: GqaQuery<'_>,
        _cache: &Tensor,
        _layout: &DeviceLayout,
    ) -> Result<Tensor, TensorError> {
        unreachable!("attention of these models is latent")
    }

    fn write_index_keys(
        &self,
        cache: &Tensor,
        keys: &Tensor,
        layout: &DeviceLayout,
    ) -> Result<(), TensorError> {
        CpuBackend.write_index_keys(cache, keys, layout)
    }

    fn select(
        &self,
        query: IndexQuery<'_>,
        cache: &Tensor,
        layout: &DeviceLayout,
    ) -> Result<(Selection, u64), TensorError> {
        CpuBackend.select(query, cache, layout)
    }
}

/// A model with a recorder, and the tokens of some sequences that the target has run over.
struct Recording {
    rig: Rig,
    recorder: &'static Recorder,
}

impl Recording {
    fn new(dir: &Path) -> Self {
        let mut rig = Rig::open(dir, true, Ops::Fused, ComputeDtype::Float32);
        let recorder: &'static Recorder = Box::leak(Box::default());
        rig.backend = recorder;
        Self { rig, recorder }
    }

    /// Runs the target over whole prompts.
    fn target(&self, prompts: &[&[TokenId]]) -> Tensor {
        let seqs: Vec<_> = (0..).zip(prompts).map(|(seq, ids)| (seq, 0, ids.len())).collect();
        let tokens: Vec<i64> = prompts.concat().into_iter().map(i64::from).collect();
        self.rig.forward(&seqs, &tokens)
    }

    /// Proposes `n_propose` drafts each behind whole prompts and token 0.
    fn propose<'a>(
        &self,
        proposer: &'a mut EagleProposer,
        prompts: &[&[TokenId]],
        n_propose: &[usize],
    ) -> Proposal<'a> {
        let hidden = self.target(prompts);
        let _ = self.recorder.take();
        let blocks: Vec<Vec<u32>> =
            (0..).map(|seq| self.rig.blocks(seq)).take(prompts.len()).collect();
        let mut end = 0;
        let seqs: Vec<DraftSeq<'_>> = prompts
            .iter()
            .zip(&blocks)
            .zip(n_propose)
            .map(|((&tokens, blocks), &n_propose)| {
                end += tokens.len();
                let rows = end - tokens.len()..end;
                let following = &[0];
                let (first_position, sampling) = (0, None);
                DraftSeq { first_position, rows, tokens, following, blocks, n_propose, sampling }
            })
            .collect();
        let mtp = self.rig.model.mtp.as_ref().unwrap().bind(&self.rig.caches, self.recorder);
        proposer.propose(&mtp, &seqs, &hidden).unwrap()
    }

    fn proposer(&self, k: usize, share: bool) -> EagleProposer {
        let mut proposer = EagleProposer::new(k, 1, self.rig.block_size).unwrap();
        proposer.share_index(share);
        proposer
    }
}

/// One layer and one MTP layer of width 4. Tokens 2, 3 and 4 are `[1, 1, 0, 0]`, `[1, -1, 0, 0]`
/// and `[1, 0, 0, 0]`; attention and experts add nothing, so that this is what every indexer sees.
/// The target's likes keys of token 2, that of the MTP layer keys of token 3.
fn picky_checkpoint() -> tempfile::TempDir {
    let config = r#"{
        "model_type": "glm_moe_dsa", "vocab_size": 6, "hidden_size": 4,
        "num_hidden_layers": 1, "intermediate_size": 4, "num_attention_heads": 1,
        "q_lora_rank": 2, "kv_lora_rank": 2, "qk_nope_head_dim": 2, "qk_rope_head_dim": 2,
        "v_head_dim": 2, "max_position_embeddings": 64, "num_nextn_predict_layers": 1,
        "eos_token_id": 1, "index_topk": 4, "index_n_heads": 1, "index_head_dim": 4,
        "index_share_for_mtp_iteration": true
    }"#;
    let matrix =
        |rows: &[[f32; 4]]| Tensor::from_slice(&rows.concat()).view([rows.len() as i64, 4]);
    let zero = [0.0; 4];
    checkpoint_of(config, &|name| {
        let liked = if name.starts_with("model.layers.0.") { 1.0 } else { -1.0 };
        match name.rsplit_once("layers.").map_or(name, |(_, rest)| &rest[2..]) {
            "model.embed_tokens.weight" => Some(matrix(&[
                zero,
                zero,
                [1.0, 1.0, 0.0, 0.0],
                [1.0, -1.0, 0.0, 0.0],
                [1.0, 0.0, 0.0, 0.0],
                zero,
            ])),
            // The MTP layer continues the target's hidden state.
            "eh_proj.weight" => {
                let eye = Tensor::eye(4, (Kind::Float, Device::Cpu));
                Some(Tensor::cat(&[eye.zeros_like(), eye], 1))
            }
            "self_attn.q_a_proj.weight" => Some(matrix(&[[1.0, 0.0, 0.0, 0.0], zero])),
            // Behind the two rotated values.
            "self_attn.indexer.wq_b.weight" => {
                Some(Tensor::from_slice(&[0f32, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]).view([4, 2]))
            }
            "self_attn.indexer.wk.weight" => {
                Some(matrix(&[zero, zero, [0.0, liked, 0.0, 0.0], zero]))
            }
            "self_attn.indexer.k_norm.bias" => Some(Tensor::zeros([4], (Kind::Float, Device::Cpu))),
            "self_attn.indexer.weights_proj.weight" => Some(matrix(&[[1.0, 0.0, 0.0, 0.0]])),
            _ => None,
        }
    })
}

/// Fault case L06: the keys of draft steps are those of the MTP layer's indexer, not the target's.
#[test]
fn draft_steps_attend_what_the_mtp_indexer_chose_in_step_zero() {
    let dir = picky_checkpoint();
    let recording = Recording::new(dir.path());
    let prompt: [TokenId; 10] = [2, 2, 2, 2, 4, 4, 3, 3, 3, 3];
    let _ = recording.target(&[&prompt]);
    let target = recording.recorder.take();
    assert_eq!(target[0][9], [0, 1, 2, 3]);

    for (share, n_calls) in [(true, 1), (false, 3)] {
        let mut proposer = recording.proposer(3, share);
        // The second propose runs the indexer anew.
        for _ in 0..2 {
            let proposal = recording.propose(&mut proposer, &[&prompt], &[3]);
            let calls = proposal.indexer.iter().map(|step| step.n_launches).sum::<u64>();
            assert_eq!((calls, proposal.indexer[0].n_launches), (n_calls, 1), "sharing {share}");
            let attended = recording.recorder.take();
            assert_eq!(attended, vec![vec![vec![6, 7, 8, 9]]; 3], "sharing {share}");
        }
    }
}

/// Ragged batches of the trained model: later steps attend each sequence's own row of step 0, also
/// when sequences drop out of the draft loop. Fault case L07.
#[test]
fn every_sequence_reuses_its_own_row() {
    let recording = Recording::new(&bundled_checkpoints::find("tiny-glm52", None).unwrap());
    let text: Vec<TokenId> = (0..300).map(|i| 300 + i * 7 % 2900).collect();
    let prompts = [&text[..90], &text[5..8], &text[40..200], &text[100..231]];
    for n_propose in [[5, 5, 5, 5], [1, 3, 5, 2], [5, 0, 2, 4]] {
        let mut proposer = recording.proposer(5, true);
        let together = recording.propose(&mut proposer, &prompts, &n_propose);
        let launches = together.indexer.map(|step| step.n_launches);
        assert_eq!(launches, [1, 0, 0, 0, 0, 0, 0, 0]);
        let together = together.drafts.to_vec();
        let attended = recording.recorder.take();
        assert_eq!(attended.len(), 5);
        let active = |step| (0..4).filter(move |&seq: &usize| n_propose[seq] > step);
        let chosen = |seq| &attended[0][active(0).position(|other| other == seq).unwrap()];
        for (step, rows) in attended.iter().enumerate() {
            let expected: Vec<_> = active(step).map(chosen).collect();
            assert_eq!(rows.iter().collect::<Vec<_>>(), expected, "step {step}, {n_propose:?}");
        }
        for (seq, prompt) in prompts.iter().enumerate() {
            let alone = recording.propose(&mut proposer, &[prompt], &[n_propose[seq]]);
            assert_eq!(alone.drafts[0], together[seq], "sequence {seq}, {n_propose:?}");
            let first = recording.recorder.take().swap_remove(0);
            assert!(n_propose[seq] == 0 || &first[0] == chosen(seq), "sequence {seq}");
        }
    }
}

/// Without sharing each step scores its own keys, the drafted positions among them.
#[test]
fn unshared_steps_choose_anew() {
    let recording = Recording::new(&bundled_checkpoints::find("tiny-glm52", None).unwrap());
    let text: Vec<TokenId> = (0..200).map(|i| 300 + i * 7 % 2900).collect();
    let mut proposer = recording.proposer(5, false);
    let proposal = recording.propose(&mut proposer, &[&text, &text[..30]], &[5, 5]);
    for (step, counts) in proposal.indexer[..5].iter().enumerate() {
        // The short sequence attends all it sees and scores nothing.
        let n_scored = 200 + step as u64;
        assert_eq!((counts.n_launches, counts.n_rows, counts.n_scored_keys), (1, 2, n_scored));
    }
    assert_eq!(proposal.indexer[5].n_launches, 0);
    let attended = recording.recorder.take();
    for (step, rows) in attended.iter().enumerate() {
        assert_eq!(rows[1], (0..30 + step as i32).collect::<Vec<_>>(), "step {step}");
        assert_eq!(rows[0].len(), 64, "step {step}");
    }
    assert!(attended[1..].iter().any(|rows| rows[0].contains(&200)), "a drafted position is seen");
}
