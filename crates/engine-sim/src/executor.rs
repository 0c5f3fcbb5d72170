//! The hash model behind paged KV, with a draft layer and rejection.

use std::collections::HashSet;

use engine_types::{
    BlockId, ExecutorError, ExecutorLimits, PlanRow, StepExecutor, StepOutcome, StepPlan, TokenId,
};

use crate::model::{State, draft_entry};
use crate::rng::Rng;

/// What a slot holds that no reader may rely on.
const POISON: Slot = Slot { entry: 0xdead_beef_dead_beef, token: TokenId::MAX };

/// The target's KV of one token, and the token (the drafter's checks need it).
#[derive(Clone, Copy, Debug)]
struct Slot {
    entry: u64,
    token: TokenId,
}

/// Executes plans with the hash model; panics where a plan breaks the contract.
#[derive(Debug)]
pub struct HashExecutor {
    limits: ExecutorLimits,
    slots: Vec<Slot>,
    draft_slots: Vec<u64>,
    rng: Rng,
    draft_accuracy_percent: u32,
    failure_percent: u32,
}

impl HashExecutor {
    /// An executor whose drafts are right, and whose steps fail, with the given probabilities.
    #[must_use]
    pub fn new(
        limits: ExecutorLimits,
        seed: u64,
        draft_accuracy_percent: u32,
        failure_percent: u32,
    ) -> Self {
        let n_slots = limits.num_blocks as usize * limits.block_size as usize;
        Self {
            limits,
            slots: vec![POISON; n_slots],
            draft_slots: vec![POISON.entry; n_slots],
            rng: Rng::new(seed),
            draft_accuracy_percent,
            failure_percent,
        }
    }

    /// Where a position lies; the block table must reach that far.
    fn slot_idx(&self, blocks: &[BlockId], position: u32) -> usize {
        assert!(position < self.limits.max_model_len, "position {position} is outside the model");
        let block = blocks[(position / self.limits.block_size) as usize];
        (block.0 * self.limits.block_size + position % self.limits.block_size) as usize
    }

    /// Checks what concerns the batch as a whole.
    fn check_plan(&self, plan: &StepPlan) {
        let rows = plan.rows();
        assert!(!rows.is_empty() && rows.len() <= self.limits.max_num_seqs as usize);
        assert!(plan.all_tokens().len() <= self.limits.max_num_batched_tokens as usize);
        assert!(plan.all_tokens().iter().all(|token| *token < self.limits.vocab_size));
        let ids: HashSet<_> = rows.iter().map(|row| row.request_id).collect();
        assert_eq!(ids.len(), rows.len(), "one row a request");
        let blocks: HashSet<_> = rows.iter().flat_map(|row| plan.blocks(row)).collect();
        let n_blocks: usize = rows.iter().map(|row| plan.blocks(row).len()).sum();
        assert_eq!(blocks.len(), n_blocks, "no block is in two tables");
    }

    fn check_row(&self, plan: &StepPlan, row: &PlanRow) {
        let n_lookahead = plan.lookahead(row).len();
        let max = self.limits.max_num_speculative_tokens;
        assert!(row.n_draft <= max && row.n_propose <= max);
        assert!(n_lookahead <= self.limits.n_lookahead_max as usize);
        assert!(row.drafting || (row.n_draft == 0 && row.n_propose == 0));
        if row.samples {
            assert_eq!(n_lookahead, 0, "the target itself says what follows");
        } else {
            assert!(row.n_draft == 0 && row.n_propose == 0, "a middle chunk drafts nothing");
            assert!(!row.drafting || n_lookahead > 0, "the drafter needs the following token");
        }
    }

    fn run_row(&mut self, plan: &StepPlan, row: &PlanRow, outcome: &mut StepOutcome) {
        let (blocks, tokens) = (plan.blocks(row), plan.tokens(row));
        let mut state = State::EMPTY;
        for position in 0..row.n_computed {
            state = state.read(self.slots[self.slot_idx(blocks, position)].entry);
        }
        let mut states = vec![];
        for (position, &token) in (row.n_computed..).zip(tokens) {
            let slot_idx = self.slot_idx(blocks, position);
            self.slots[slot_idx] = Slot { entry: state.entry(token), token };
            state = state.extend(token);
            states.push(state);
        }
        let n_known = (row.n_query - row.n_draft) as usize;
        let mut run = vec![];
        let mut n_accepted = 0;
        if row.samples {
            let vocab_size = self.limits.vocab_size;
            run.push(states[n_known - 1].next_token(vocab_size));
            for draft_idx in 0..row.n_draft as usize {
                if run[draft_idx] != tokens[n_known + draft_idx] {
                    break;
                }
                n_accepted += 1;
                run.push(states[n_known + draft_idx].next_token(vocab_size));
            }
        }
        let valid_len = row.n_computed + row.n_query - row.n_draft + n_accepted;
        for position in valid_len..row.n_computed + row.n_query {
            let slot_idx = self.slot_idx(blocks, position);
            self.slots[slot_idx] = POISON;
        }
        let last = states[n_known + n_accepted as usize - 1];
        let following = run.last().or(plan.lookahead(row).first()).copied();
        let drafts = match following {
            Some(following) if row.drafting => {
                self.follow(plan, row, valid_len, following);
                self.propose(plan, row, valid_len, last.extend(following))
            }
            _ => vec![],
        };
        outcome.push_row(row.request_id, &run, n_accepted, &drafts);
    }

    /// Runs the draft layer over the valid positions of the step and reads all its KV back.
    fn follow(&mut self, plan: &StepPlan, row: &PlanRow, valid_len: u32, following: TokenId) {
        let blocks = plan.blocks(row);
        for position in 0..valid_len {
            let slot_idx = self.slot_idx(blocks, position);
            let next = if position + 1 == valid_len {
                following
            } else {
                self.slots[self.slot_idx(blocks, position + 1)].token
            };
            let expected = draft_entry(self.slots[slot_idx].entry, next);
            if position >= row.n_computed {
                self.draft_slots[slot_idx] = expected;
            }
            let found = self.draft_slots[slot_idx];
            assert_eq!(found, expected, "{}: draft KV at {position}", row.request_id);
        }
    }

    /// Proposes drafts; each one after the first leaves a draft KV entry behind the valid ones.
    fn propose(
        &mut self,
        plan: &StepPlan,
        row: &PlanRow,
        valid_len: u32,
        mut state: State,
    ) -> Vec<TokenId> {
        let mut drafts = vec![];
        for step in 0..row.n_propose {
            if step > 0 {
                let slot_idx = self.slot_idx(plan.blocks(row), valid_len + step - 1);
                self.draft_slots[slot_idx] = POISON.entry;
            }
            let right = state.next_token(self.limits.vocab_size);
            let is_right = self.rng.chance(self.draft_accuracy_percent);
            let draft =
                if is_right { right } else { self.rng.between(0, self.limits.vocab_size - 1) };
            drafts.push(draft);
            state = state.extend(draft);
        }
        drafts
    }
}

impl StepExecutor for HashExecutor {
    fn limits(&self) -> ExecutorLimits {
        self.limits
    }

    fn execute(&mut self, plan: &StepPlan, outcome: &mut StepOutcome) -> Result<(), ExecutorError> {
        self.check_plan(plan);
        let mut answers = StepOutcome::default();
        for row in plan.rows() {
            self.check_row(plan, row);
            self.run_row(plan, row, &mut answers);
        }
        if self.rng.chance(self.failure_percent) {
            return Err(ExecutorError::Step("injected".to_owned()));
        }
        let mut order: Vec<_> = answers.rows().iter().collect();
        self.rng.shuffle(&mut order);
        outcome.clear();
        for row in order {
            let (tokens, drafts) = (answers.tokens(row), answers.drafts(row));
            outcome.push_row(row.request_id, tokens, row.n_accepted, drafts);
        }
        Ok(())
    }
}
