//! Steps in flight of an executor that runs a step while it is collected.

use crate::executor::{ExecutorError, MAX_STEPS_IN_FLIGHT};
use crate::outcome::StepOutcome;
use crate::plan::StepPlan;

/// The launched steps of an executor whose device is the thread that collects. Buffers are reused.
///
/// A step runs when it is collected. By then the outcome of the step before is known, so that every
/// row gets its tokens ([`StepPlan::resolve`]).
#[derive(Debug, Default)]
pub struct StepQueue {
    /// In the order of the steps; those behind the first `n_launched` are spare buffers.
    plans: Vec<StepPlan>,
    n_launched: usize,
    resolved: StepPlan,
    previous: StepOutcome,
    has_previous: bool,
}

impl StepQueue {
    /// Takes a step.
    ///
    /// # Panics
    ///
    /// If [`MAX_STEPS_IN_FLIGHT`] steps have not been collected.
    pub fn launch(&mut self, plan: &StepPlan) {
        assert!(self.n_launched < MAX_STEPS_IN_FLIGHT, "too many steps in flight");
        match self.plans.get_mut(self.n_launched) {
            Some(spare) => spare.clone_from(plan),
            None => self.plans.push(plan.clone()),
        }
        self.n_launched += 1;
    }

    /// Runs the oldest step with `run`, which gets a plan without tokens in flight and an empty
    /// outcome, and fills `outcome`.
    ///
    /// # Errors
    ///
    /// That of `run`.
    ///
    /// # Panics
    ///
    /// If no step was launched.
    pub fn collect(
        &mut self,
        outcome: &mut StepOutcome,
        run: impl FnOnce(&StepPlan, &mut StepOutcome) -> Result<(), ExecutorError>,
    ) -> Result<(), ExecutorError> {
        assert!(self.n_launched > 0, "no step was launched");
        let previous = self.has_previous.then_some(&self.previous);
        self.resolved.resolve(&self.plans[0], previous);
        self.plans.rotate_left(1);
        self.n_launched -= 1;
        outcome.clear();
        let result = run(&self.resolved, outcome);
        self.has_previous = result.is_ok();
        if result.is_ok() {
            let launched = self.plans.last().expect("the step that ran");
            if self.resolved.rows().len() < launched.rows().len() {
                let ran = |id| self.resolved.rows().iter().any(|row| row.request_id == id);
                let left_out = launched.rows().iter().map(|row| row.request_id);
                left_out.filter(|id| !ran(*id)).for_each(|id| outcome.push_row(id, &[], 0, &[]));
            }
            self.previous.clone_from(outcome);
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{RequestId, RowSpec};

    const SPEC: RowSpec = RowSpec {
        n_computed: 0,
        n_draft: 0,
        samples: true,
        prefill: true,
        drafting: true,
        n_propose: 2,
        has_sampler: false,
    };

    fn prompt() -> StepPlan {
        let mut plan = StepPlan::default();
        let table = plan.update_table(0, 0, &[crate::BlockId(3)]);
        plan.push_row(RequestId(5), SPEC, &[10, 11], &[], table);
        plan
    }

    /// A step that continues that of [`prompt`], and a request of its own behind.
    fn next(n_computed: u32) -> StepPlan {
        let mut plan = StepPlan::default();
        let table = plan.update_table(0, 1, &[crate::BlockId(4)]);
        let spec = RowSpec { n_computed, n_draft: 2, prefill: false, ..SPEC };
        plan.push_deferred_row(RequestId(5), spec, 0, table);
        let table = plan.update_table(1, 0, &[crate::BlockId(9)]);
        plan.push_row(RequestId(6), SPEC, &[30], &[], table);
        plan
    }

    #[test]
    fn rows_in_flight_get_the_tokens_of_the_step_before() {
        let (mut queue, mut outcome) = (StepQueue::default(), StepOutcome::default());
        queue.launch(&prompt());
        queue.launch(&next(2));
        assert_eq!((next(2).n_queried(), next(2).all_tokens()), (4, &[30][..]));
        let answer = |plan: &StepPlan, outcome: &mut StepOutcome| {
            assert_eq!(plan, &prompt());
            outcome.push_row(RequestId(5), &[20], 0, &[21, 22]);
            Ok(())
        };
        queue.collect(&mut outcome, answer).unwrap();
        queue.launch(&next(3));
        let answer = |plan: &StepPlan, outcome: &mut StepOutcome| {
            let row = &plan.rows()[0];
            assert_eq!((plan.tokens(row), row.n_computed), (&[20, 21, 22][..], 2));
            assert_eq!(plan.drafts(row), [21, 22]);
            assert_eq!(plan.tokens(&plan.rows()[1]), [30]);
            assert_eq!(plan.rows()[1].token_span().range(), 3..4);
            // In another order than that of the rows.
            outcome.push_row(RequestId(6), &[31], 0, &[1, 2]);
            outcome.push_row(RequestId(5), &[21, 40], 1, &[41, 42]);
            Ok(())
        };
        queue.collect(&mut outcome, answer).unwrap();
        let answer = |plan: &StepPlan, _: &mut StepOutcome| {
            let row = &plan.rows()[0];
            assert_eq!((plan.tokens(row), row.n_computed), (&[40, 41, 42][..], 4));
            Ok(())
        };
        queue.collect(&mut outcome, answer).unwrap();
    }

    #[test]
    fn a_failed_step_leaves_out_what_continues_it_and_no_more() {
        let (mut queue, mut outcome) = (StepQueue::default(), StepOutcome::default());
        queue.launch(&prompt());
        queue.launch(&next(2));
        let failure = ExecutorError::Step("no memory".to_owned());
        let failed = queue.collect(&mut outcome, |_, _| Err(failure.clone()));
        assert_eq!(failed, Err(failure));
        let answer = |plan: &StepPlan, outcome: &mut StepOutcome| {
            assert_eq!(plan.rows().len(), 1);
            assert_eq!(plan.table_updates().count(), 2, "tables follow all plans");
            outcome.push_row(RequestId(6), &[31], 0, &[1, 2]);
            Ok(())
        };
        queue.collect(&mut outcome, answer).unwrap();
        let left_out = outcome.row(RequestId(5)).expect("every planned row is answered");
        assert!(outcome.tokens(left_out).is_empty());
    }

    #[test]
    fn parts_of_a_plan_have_their_rows_with_their_tokens() {
        let mut plan = prompt();
        let table = plan.update_table(1, 0, &[crate::BlockId(9)]);
        plan.push_row(RequestId(6), SPEC, &[30], &[31], table);
        let mut part = StepPlan::default();
        part.keep_rows(&plan, |row| row.request_id == RequestId(6));
        let row = part.rows()[0];
        assert_eq!(
            (part.rows().len(), part.tokens(&row), part.lookahead(&row)),
            (1, &[30][..], &[31][..])
        );
        assert_eq!((part.n_queried(), row.token_span().range()), (1, 0..1));
        assert!(part.table_updates().eq(plan.table_updates()));
    }
}
