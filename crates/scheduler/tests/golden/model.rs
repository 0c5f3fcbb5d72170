//! The executor of the tests: a language model that knows every text.
//!
//! Each request has a text, by default the token `1000 + p` at position `p`. The model continues
//! it, drafts its first `n_right` tokens right and the others wrong, and checks that what it is fed
//! is the text: a token that was made up, lost or doubled shows at once. Each slot of its KV holds
//! a hash of all tokens up to its position, so that a row that reads a slot which was not written,
//! or for another text, shows as well.

use std::collections::{HashMap, HashSet};

use engine_types::{
    BlockTables, ExecutorError, ExecutorLimits, PlanRow, Request, RequestId, StepOutcome, StepPlan,
    StepQueue, TokenId,
};

/// A draft that no text has.
const WRONG: TokenId = 9_999;

/// What a request says, from its prompt on.
struct Text {
    tokens: Vec<TokenId>,
    /// What the hashes of its KV begin with: requests of different salts share nothing.
    root: u64,
}

/// The hash of a text behind `hash`, followed by `token`.
fn chained(hash: u64, token: TokenId) -> u64 {
    let mixed = (hash ^ u64::from(token)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ (mixed >> 29)) | 1
}

pub(crate) struct Model {
    block_size: usize,
    queue: StepQueue,
    tables: BlockTables,
    texts: HashMap<RequestId, Text>,
    /// By slot; 0 where nothing was written.
    kv: Vec<u64>,
    /// Proposals that are right, at most.
    pub(crate) n_right: u32,
    fails_next: bool,
    /// Requests of a step that failed. Chunks of them that were in flight behind it find no KV.
    failed: HashSet<RequestId>,
    /// The rows of the last step that ran, with their tokens.
    pub(crate) ran: Vec<(PlanRow, Vec<TokenId>)>,
}

impl Model {
    pub(crate) fn new(limits: &ExecutorLimits) -> Self {
        Self {
            block_size: limits.block_size as usize,
            queue: StepQueue::default(),
            tables: BlockTables::default(),
            texts: HashMap::new(),
            kv: vec![0; (limits.num_blocks * limits.block_size) as usize],
            n_right: 8,
            fails_next: false,
            failed: HashSet::new(),
            ran: vec![],
        }
    }

    /// Learns that a request and its siblings say `output` behind their prompt.
    pub(crate) fn learn(&mut self, request: &Request, output: &[TokenId]) {
        let salt = request.cache_salt.iter().flatten();
        let root = salt.fold(1, |hash, byte| chained(hash, TokenId::from(*byte)));
        for id in std::iter::once(request.id).chain(request.siblings.iter().copied()) {
            let tokens = [&request.prompt, output].concat();
            self.texts.insert(id, Text { tokens, root });
        }
    }

    pub(crate) fn launch(&mut self, plan: &StepPlan) {
        self.queue.launch(plan);
    }

    /// Lets the oldest step, that of `plan`, fail.
    pub(crate) fn fail(&mut self, plan: &StepPlan) -> ExecutorError {
        self.fails_next = true;
        self.failed.extend(plan.rows().iter().map(|row| row.request_id));
        self.collect().expect_err("the step fails")
    }

    /// Runs the oldest step.
    pub(crate) fn collect(&mut self) -> Result<StepOutcome, ExecutorError> {
        let mut queue = std::mem::take(&mut self.queue);
        let mut outcome = StepOutcome::default();
        let result = queue.collect(&mut outcome, |plan, outcome| {
            self.answer(plan, outcome);
            match std::mem::take(&mut self.fails_next) {
                true => Err(ExecutorError::Step("as the test asked".to_owned())),
                false => Ok(()),
            }
        });
        self.queue = queue;
        result.map(|()| outcome)
    }

    fn token(&self, id: RequestId, position: u32) -> TokenId {
        let tokens = &self.texts[&id].tokens;
        tokens.get(position as usize).copied().unwrap_or(1000 + position)
    }

    /// Reads the KV in front of a row and writes that of its tokens.
    fn attend(&mut self, row: &PlanRow, tokens: &[TokenId]) {
        let block_size = self.block_size;
        let (id, blocks) = (row.request_id, self.tables.blocks(row.table));
        let n_written = row.n_computed + row.n_query + row.n_propose.saturating_sub(1);
        assert!(blocks.len() * block_size >= n_written as usize, "{id}: KV has a place");
        let slot = |position: u32| {
            let position = position as usize;
            blocks[position / block_size].0 as usize * block_size + position % block_size
        };
        let mut hash = self.texts[&id].root;
        for position in 0..row.n_computed {
            hash = chained(hash, self.token(id, position));
            let is_right = self.kv[slot(position)] == hash || self.failed.contains(&id);
            assert!(is_right, "{id}: KV of position {position}");
        }
        for position in row.n_computed..n_written {
            let idx = (position - row.n_computed) as usize;
            // Behind the tokens the drafter writes what is no KV of the text.
            hash = tokens.get(idx).map_or(0, |token| chained(hash, *token));
            self.kv[slot(position)] = if self.fails_next { 0 } else { hash };
        }
    }

    fn answer(&mut self, plan: &StepPlan, outcome: &mut StepOutcome) {
        let block_size = self.block_size;
        for copy in plan.copies() {
            let [from, to] = [copy.from, copy.to].map(|block| block.0 as usize * block_size);
            self.kv.copy_within(from..from + block_size, to);
        }
        self.tables.update(plan);
        self.ran = plan.rows().iter().map(|row| (*row, plan.tokens(row).to_vec())).collect();
        let mut rows: Vec<&PlanRow> = plan.rows().iter().collect();
        // Rows are joined by request, so that their order says nothing.
        if plan.step_id.0 % 2 == 1 {
            rows.reverse();
        }
        for row in rows {
            let (id, n_known) = (row.request_id, row.n_query - row.n_draft);
            let known = plan.tokens(row)[..n_known as usize].iter().chain(plan.lookahead(row));
            for (position, token) in (row.n_computed..).zip(known) {
                assert_eq!(*token, self.token(id, position), "{id} at {position}");
            }
            self.attend(row, plan.tokens(row));

            let next = row.n_computed + n_known;
            let is_right =
                |(position, draft): &(u32, &TokenId)| **draft == self.token(id, *position);
            let drafts = (next..).zip(plan.drafts(row));
            let n_accepted = drafts.take_while(is_right).count() as u32;
            let run = (next..=next + n_accepted).map(|position| self.token(id, position));
            let run: Vec<TokenId> = if row.samples { run.collect() } else { vec![] };
            let proposal = |n| match n < self.n_right {
                true => self.token(id, next + n_accepted + 1 + n),
                false => WRONG,
            };
            let proposals: Vec<TokenId> = (0..row.n_propose).map(proposal).collect();
            outcome.push_row(id, &run, n_accepted, &proposals);
        }
    }
}
