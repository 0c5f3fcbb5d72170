//! A model on a GPU as a subject of the runner: each pass starts and ends on the host.
//!
//! Hidden states stay on the device. What the host has in their place are tensors of their rows,
//! i64 `[T, 2]`: whether a draft pass left them, and the row. Whatever selects rows selects those.

use std::cell::RefCell;

use attention_backends::Selection;
use batch_layout::BatchLayout;
use engine_types::{BlockCopy, IndexerCounts};
use gpu_model::{AnyModel, DraftPass, HiddenRows};
use models::ForwardOutput;
use spec_decode::{DraftError, DraftInput, DraftModel, DraftOutput};
use tch::Tensor;
use torch_ext::slice;

use crate::error::StepError;

/// A model on a GPU. The device has one stream, so that passes never overlap.
pub(crate) struct GpuSubject {
    pub(crate) model: RefCell<Box<dyn AnyModel>>,
    facts: Facts,
}

/// What does not change.
#[derive(Clone, Copy)]
struct Facts {
    num_mtp_layers: usize,
    can_share_selection: bool,
    vocab: i64,
    topk: usize,
    /// Layers of the target with an indexer.
    n_indexers: usize,
}

impl GpuSubject {
    pub(crate) fn new(model: Box<dyn AnyModel>) -> Self {
        let config = model.config();
        let layers = 0..config.num_hidden_layers;
        let facts = Facts {
            num_mtp_layers: model.num_mtp_layers(),
            can_share_selection: model.can_share_selection(),
            vocab: config.vocab_size as i64,
            topk: config.dsa.as_ref().map_or(0, |dsa| dsa.index_topk),
            n_indexers: layers.filter(|&idx| config.has_indexer(idx)).count(),
        };
        Self { model: RefCell::new(model), facts }
    }

    pub(crate) fn copy_blocks(&self, copies: &[BlockCopy]) -> Result<(), StepError> {
        let mut model = self.model.borrow_mut();
        let mut each = copies.iter();
        Ok(each.try_for_each(|copy| model.copy_block(copy.from.0, copy.to.0))?)
    }

    pub(crate) fn forward(
        &self,
        ids: &[i64],
        layout: &BatchLayout,
    ) -> Result<ForwardOutput, StepError> {
        self.model.borrow_mut().forward(&narrow(ids), layout)?;
        let hidden = places(false, ids.len())?;
        let indexer = self.facts.indexer_counts(layout, self.facts.n_indexers);
        Ok(ForwardOutput { hidden, indexer })
    }

    pub(crate) fn logits(&self, hidden: &Tensor) -> Result<Tensor, StepError> {
        self.logits_by(hidden, None)
    }

    fn logits_by(&self, hidden: &Tensor, mtp: Option<usize>) -> Result<Tensor, StepError> {
        let (of_draft, rows) = rows_of(hidden)?;
        let hidden = HiddenRows { of_draft, rows: &rows };
        let logits = self.model.borrow_mut().logits(hidden, mtp)?;
        Ok(Tensor::f_from_slice(&logits)?.f_view([rows.len() as i64, self.facts.vocab])?)
    }

    pub(crate) fn drafter(&self) -> Option<Box<dyn DraftModel + '_>> {
        if self.facts.num_mtp_layers == 0 { None } else { Some(Box::new(Drafter(self))) }
    }
}

impl Facts {
    /// What `n_indexers` indexers did in a pass over this layout: nothing where it has no rows.
    fn indexer_counts(&self, layout: &BatchLayout, n_indexers: usize) -> IndexerCounts {
        let n = if layout.n_tokens() > 0 { n_indexers as u64 } else { 0 };
        let seen = layout.positions().iter().map(|&position| position as u64 + 1);
        let n_scored_keys: u64 = seen.filter(|&seen| seen > self.topk as u64).sum();
        IndexerCounts {
            n_launches: n,
            n_rows: n * layout.n_tokens() as u64,
            n_scored_keys: n * n_scored_keys,
        }
    }
}

/// The MTP layers.
struct Drafter<'a>(&'a GpuSubject);

impl Drafter<'_> {
    fn run(&self, input: &DraftInput<'_>) -> Result<DraftOutput, StepError> {
        let facts = &self.0.facts;
        let ids = input.token_ids.f_contiguous()?;
        let (of_draft, hidden) = rows_of(input.hidden)?;
        let selection = input.selection.map(|selection| padded(selection, facts.topk));
        let selection = selection.transpose()?;
        let rows = input.output_rows.map(slice::<i64>).transpose()?;
        let narrowed = rows.map(|rows| (narrow(rows), input.layout.select_rows(rows)));
        let n_output = rows.map_or(ids.numel(), <[i64]>::len);
        let selection = self.0.model.borrow_mut().draft(DraftPass {
            layer: input.layer,
            ids: &narrow(slice(&ids)?),
            hidden: HiddenRows { of_draft, rows: &hidden },
            layout: input.layout.host(),
            output: narrowed.as_ref().map(|(rows, layout)| (&rows[..], layout.host())),
            selection: selection.as_ref().map(|(indices, counts)| (&indices[..], &counts[..])),
        })?;
        let chose_for = narrowed.as_ref().map_or(input.layout, |(_, layout)| layout);
        let selection = selection.map(|(indices, counts)| -> Result<_, StepError> {
            let shape = [counts.len() as i64, facts.topk as i64];
            let indices = Tensor::f_from_slice(&indices)?.f_view(shape)?;
            Ok(Selection::new(indices, Tensor::f_from_slice(&counts)?)?)
        });
        let ran = usize::from(selection.is_some());
        Ok(DraftOutput {
            hidden: places(true, n_output)?,
            indexer: facts.indexer_counts(chose_for.host(), ran),
            selection: selection.transpose()?,
        })
    }
}

impl DraftModel for Drafter<'_> {
    fn num_layers(&self) -> usize {
        self.0.facts.num_mtp_layers
    }

    fn can_share_selection(&self) -> bool {
        self.0.facts.can_share_selection
    }

    fn step(&self, input: DraftInput<'_>) -> Result<DraftOutput, DraftError> {
        self.run(&input).map_err(|error| DraftError::Model(error.to_string()))
    }

    fn logits(&self, layer: usize, hidden: &Tensor) -> Result<Tensor, DraftError> {
        let logits = self.0.logits_by(hidden, Some(layer));
        logits.map_err(|error| DraftError::Model(error.to_string()))
    }
}

/// What stands for the hidden states of the first `n_rows` rows.
fn places(of_draft: bool, n_rows: usize) -> Result<Tensor, StepError> {
    let places: Vec<i64> = (0..n_rows as i64).flat_map(|row| [of_draft.into(), row]).collect();
    Ok(Tensor::f_from_slice(&places)?.f_view([n_rows as i64, 2])?)
}

/// The rows that stand for hidden states, and whether a draft pass left them.
fn rows_of(hidden: &Tensor) -> Result<(bool, Vec<i32>), StepError> {
    let hidden = hidden.f_contiguous()?;
    let places = slice::<i64>(&hidden)?;
    let rows: Vec<i64> = places.chunks_exact(2).map(|place| place[1]).collect();
    Ok((places.first() == Some(&1), narrow(&rows)))
}

fn narrow(ids: &[i64]) -> Vec<i32> {
    ids.iter().map(|&id| i32::try_from(id).expect("ids and rows are below 2^31")).collect()
}

/// A selection whose rows are `topk` wide.
fn padded(selection: &Selection, topk: usize) -> Result<(Vec<i32>, Vec<i32>), StepError> {
    let mut indices = Vec::with_capacity(selection.n_rows() * topk);
    let rows = selection.to_rows()?;
    for row in &rows {
        indices.extend_from_slice(row);
        indices.resize(indices.len() + topk - row.len(), -1);
    }
    Ok((indices, rows.iter().map(|row| row.len() as i32).collect()))
}

#[cfg(test)]
mod tests {
    use batch_layout::SeqSpec;

    use super::*;

    /// Of a prompt that goes on, the draft layer's pass has no rows whose drafts are wanted.
    #[test]
    fn a_pass_without_rows_runs_no_indexer() {
        let facts = Facts {
            num_mtp_layers: 1,
            can_share_selection: true,
            vocab: 8,
            topk: 2,
            n_indexers: 3,
        };
        let mut layout = BatchLayout::new(4);
        layout.finish();
        assert_eq!(facts.indexer_counts(&layout, 1), IndexerCounts::default());
        layout.clear();
        layout.push(SeqSpec { n_computed: 1, n_query: 2 }, &[0]);
        layout.finish();
        let IndexerCounts { n_launches, n_rows, n_scored_keys } = facts.indexer_counts(&layout, 3);
        assert_eq!((n_launches, n_rows, n_scored_keys), (3, 6, 9));
    }
}
