//! The hash model behind paged KV, with a draft layer and rejection.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use engine_types::{
    BlockId, BlockTables, ExecutorError, ExecutorLimits, PlanRow, RequestId, StepExecutor,
    StepOutcome, StepPlan, StepQueue, TokenId,
};

use crate::guide::choose;
use crate::model::{Drafter, State, Voice, draft_entry};
use crate::rng::Rng;

/// What a slot holds that no reader may rely on.
const POISON: Slot = Slot { entry: 0xdead_beef_dead_beef, token: TokenId::MAX };

/// A layer's KV of one position, and the token it was made of.
#[derive(Clone, Copy, Debug)]
struct Slot {
    entry: u64,
    token: TokenId,
}

/// Executes plans with the hash model and as many draft layers as plans look ahead; panics where a
/// plan breaks the contract.
#[derive(Debug)]
pub(crate) struct HashExecutor {
    limits: ExecutorLimits,
    queue: StepQueue,
    tables: BlockTables,
    /// The target's KV.
    slots: Vec<Slot>,
    /// Each draft layer's KV.
    draft_slots: Vec<Vec<Slot>>,
    /// How far each request's KV reached when it last had a row.
    valid_lens: HashMap<RequestId, u32>,
    rng: Rng,
    drafter: Drafter,
    failure_percent: u32,
    row_failure_percent: u32,
}

impl HashExecutor {
    /// An executor whose steps, and single rows, fail with the given probabilities.
    pub(crate) fn new(
        limits: ExecutorLimits,
        seed: u64,
        drafter: Drafter,
        (failure_percent, row_failure_percent): (u32, u32),
    ) -> Self {
        let n_slots = limits.num_blocks as usize * limits.block_size as usize;
        Self {
            limits,
            queue: StepQueue::default(),
            tables: BlockTables::default(),
            slots: vec![POISON; n_slots],
            draft_slots: vec![vec![POISON; n_slots]; limits.n_lookahead_max as usize],
            valid_lens: HashMap::new(),
            rng: Rng::new(seed),
            drafter,
            failure_percent,
            row_failure_percent,
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
        assert!(rows.len() <= self.limits.max_num_seqs as usize);
        assert!(plan.n_queried() <= self.limits.max_num_batched_tokens as usize);
        assert!(plan.all_tokens().iter().all(|token| *token < self.limits.vocab_size));
        let ids: HashSet<_> = rows.iter().map(|row| row.request_id).collect();
        assert_eq!(ids.len(), rows.len(), "one row a request");
        let mut n_tables = HashMap::new();
        for block in rows.iter().flat_map(|row| self.tables.blocks(row.table)) {
            *n_tables.entry(block).or_insert(0) += 1;
        }
        for row in rows {
            let n_whole = (row.n_computed / self.limits.block_size) as usize;
            let is_own =
                self.tables.blocks(row.table)[n_whole..].iter().all(|block| n_tables[block] == 1);
            assert!(is_own, "{}: a block to be written is in one table only", row.request_id);
        }
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

    /// Blocks that take over others' content do so in every layer.
    fn copy_blocks(&mut self, plan: &StepPlan) {
        let block_size = self.limits.block_size as usize;
        let mut written = HashSet::new();
        for copy in plan.copies() {
            assert!(written.insert(copy.to), "{} is copied to once", copy.to);
        }
        for copy in plan.copies() {
            assert!(!written.contains(&copy.from), "{} is copied from and to", copy.from);
            let (from, to) = (copy.from.0 as usize * block_size, copy.to.0 as usize * block_size);
            for slots in std::iter::once(&mut self.slots).chain(&mut self.draft_slots) {
                slots.copy_within(from..from + block_size, to);
            }
        }
    }

    /// A row that failed may have written anything where it was to write.
    fn poison(&mut self, row: &PlanRow) {
        let blocks = self.tables.blocks(row.table).to_vec();
        for position in row.n_computed..row.n_computed + row.n_query {
            let slot_idx = self.slot_idx(&blocks, position);
            self.slots[slot_idx] = POISON;
            self.draft_slots.iter_mut().for_each(|slots| slots[slot_idx] = POISON);
        }
    }

    fn run_row(&mut self, plan: &StepPlan, row: &PlanRow, outcome: &mut StepOutcome) {
        let (blocks, tokens) = (self.tables.blocks(row.table).to_vec(), plan.tokens(row));
        let blocks = &blocks[..];
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
            let (vocab_size, voice) = (self.limits.vocab_size, Voice::of(row.request_id));
            let n_words = vocab_size.div_ceil(u32::BITS) as usize;
            let masks = plan.masks(row);
            assert!([0, n_words * (1 + row.n_draft as usize)].contains(&masks.len()));
            for (mask, draft) in masks.chunks_exact(n_words).zip(&tokens[n_known..]) {
                let allowed = choose(*draft, mask, vocab_size);
                assert_eq!(allowed, *draft, "a draft is verified that its grammar forbids");
            }
            let choice = |n: usize| {
                let mask = if masks.is_empty() { masks } else { &masks[n * n_words..][..n_words] };
                let wanted = states[n_known - 1 + n].next_token(vocab_size, voice);
                choose(wanted, mask, vocab_size)
            };
            run.push(choice(0));
            for draft_idx in 0..row.n_draft as usize {
                if run[draft_idx] != tokens[n_known + draft_idx] {
                    break;
                }
                n_accepted += 1;
                run.push(choice(draft_idx + 1));
            }
        }
        let valid_len = row.n_computed + row.n_query - row.n_draft + n_accepted;
        for position in row.n_computed..row.n_computed + row.n_query {
            let slot_idx = self.slot_idx(blocks, position);
            self.draft_slots.iter_mut().for_each(|slots| slots[slot_idx] = POISON);
            if position >= valid_len {
                self.slots[slot_idx] = POISON;
            }
        }
        let mut drafts = vec![];
        if row.drafting {
            let following = run.last().map_or(plan.lookahead(row), std::slice::from_ref);
            let known = [&tokens[..(valid_len - row.n_computed) as usize], following].concat();
            let last = states[n_known + n_accepted as usize - 1];
            drafts = self.propose(row, valid_len, &known, last.extend(following[0]));
            self.check_shared(row, &known);
        }
        self.valid_lens.insert(row.request_id, valid_len);
        outcome.push_row(row.request_id, &run, n_accepted, &drafts);
    }

    /// Runs the draft layers over the valid positions of the step and then one after the other for
    /// each draft: draft `j` comes from layer `j mod n` of `n`.
    ///
    /// `known` are the tokens from the row's first position on, those that follow the valid ones
    /// included. Where a layer needs a token behind them it takes a draft, or else the last one.
    fn propose(
        &mut self,
        row: &PlanRow,
        valid_len: u32,
        known: &[TokenId],
        mut state: State,
    ) -> Vec<TokenId> {
        let blocks = &self.tables.blocks(row.table).to_vec()[..];
        let n_layers = self.limits.n_lookahead_max;
        let mut known = known.to_vec();
        let mut read = vec![];
        for step in 0..n_layers.max(row.n_propose) {
            let layer = step % n_layers;
            if step < n_layers {
                read.push(self.follow(blocks, row.n_computed..valid_len, layer, &known));
            } else {
                let slot_idx = self.slot_idx(blocks, valid_len + step / n_layers - 1);
                self.draft_slots[layer as usize][slot_idx] = POISON;
                let below = read[layer as usize];
                read[layer as usize] = below.extend(*known.last().expect("[INV-6]"));
            }
            if step < row.n_propose {
                let voice = Voice::of(row.request_id);
                let right = state.next_token(self.limits.vocab_size, voice);
                let draft = self.drafter.draft(read[layer as usize], right);
                known.push(draft);
                state = state.extend(draft);
            }
        }
        known.split_off(known.len() - row.n_propose as usize)
    }

    /// Writes a draft layer's KV at `positions`, the first of which is that of `known`, and reads
    /// all of it up to there.
    fn follow(
        &mut self,
        blocks: &[BlockId],
        positions: Range<u32>,
        layer: u32,
        known: &[TokenId],
    ) -> State {
        let mut read = State::EMPTY;
        for position in 0..positions.end {
            let slot_idx = self.slot_idx(blocks, position);
            if position >= positions.start {
                let offset = (position - positions.start + 1 + layer) as usize;
                let token = known[offset.min(known.len() - 1)];
                let below = match layer.checked_sub(1) {
                    None => self.slots[slot_idx].entry,
                    Some(below) => self.draft_slots[below as usize][slot_idx].entry,
                };
                let slot = Slot { entry: draft_entry(below, token), token };
                self.draft_slots[layer as usize][slot_idx] = slot;
            }
            read = read.read(self.draft_slots[layer as usize][slot_idx].entry);
        }
        read
    }

    /// Checks the draft layers' KV of a prefix that the request has not computed itself: it is made
    /// of the request's own tokens, those behind the prefix included. Drafts alone would not show
    /// that, since with several layers KV of a request's own may come from rejected drafts.
    fn check_shared(&self, row: &PlanRow, known: &[TokenId]) {
        if self.valid_lens.get(&row.request_id) == Some(&row.n_computed) {
            return;
        }
        let blocks = self.tables.blocks(row.table);
        for (layer, slots) in (1..).zip(&self.draft_slots) {
            for position in 0..row.n_computed {
                let found = slots[self.slot_idx(blocks, position)].token;
                let expected = match (position + layer).checked_sub(row.n_computed) {
                    None => self.slots[self.slot_idx(blocks, position + layer)].token,
                    Some(offset) => known[offset as usize],
                };
                assert_eq!(found, expected, "{}: draft KV at {position}", row.request_id);
            }
        }
    }
}

impl StepExecutor for HashExecutor {
    fn limits(&self) -> ExecutorLimits {
        self.limits
    }

    fn launch(&mut self, plan: &StepPlan) {
        self.queue.launch(plan);
    }

    fn collect(&mut self, outcome: &mut StepOutcome) -> Result<(), ExecutorError> {
        let mut queue = std::mem::take(&mut self.queue);
        let result = queue.collect(outcome, |plan, outcome| self.run(plan, outcome));
        self.queue = queue;
        result
    }
}

impl HashExecutor {
    fn run(&mut self, plan: &StepPlan, outcome: &mut StepOutcome) -> Result<(), ExecutorError> {
        self.copy_blocks(plan);
        self.tables.update(plan);
        self.check_plan(plan);
        let mut answers = StepOutcome::default();
        for row in plan.rows() {
            self.check_row(plan, row);
            self.run_row(plan, row, &mut answers);
        }
        if self.rng.chance(self.failure_percent) {
            plan.rows().iter().for_each(|row| self.poison(row));
            return Err(ExecutorError::Step("injected".to_owned()));
        }
        let mut order: Vec<_> = plan.rows().iter().zip(answers.rows()).collect();
        self.rng.shuffle(&mut order);
        for (planned, row) in order {
            if self.rng.chance(self.row_failure_percent) {
                self.poison(planned);
                outcome.push_failed_row(row.request_id, "injected into a row".to_owned());
                continue;
            }
            let (tokens, drafts) = (answers.tokens(row), answers.drafts(row));
            outcome.push_row(row.request_id, tokens, row.n_accepted, drafts);
        }
        Ok(())
    }
}
