//! Each request's way through the plans and outcomes of a run, and the statistics that follow from
//! it: what the scheduler says of itself must be the same.

use std::collections::{BTreeMap, HashSet};

use engine_types::{
    FinishReason, OutcomeRow, PlanRow, Request, RequestEvent, RequestId, StepOutcome, StepPlan,
    TokenSource, TokensEvent,
};
use scheduler::SchedulerStats;

use crate::ledger::is_from_outside;
use crate::rules::Rules;

/// Who is before whom; ties by the order of submission.
pub(crate) type Rank = (i64, u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Has never run.
    Waiting,
    /// Has blocks, and this block table of the executor.
    Running(u32),
    /// Had blocks.
    Preempted,
    Ended,
}

#[derive(Debug)]
struct Traced {
    rank: Rank,
    place: Place,
    /// The sibling with whose prompt it waits.
    leader: Option<RequestId>,
    /// Whether what follows tokens in flight is not known.
    is_guided: bool,
    n_prompt: u32,
    /// How many tokens it leaves uncomputed at the end of what a sibling has computed.
    n_unshared: u32,
    /// Committed tokens, and how many there were when it got its blocks.
    n_tokens: u32,
    n_prefill: u32,
    was_preempted: bool,
    /// KV that its next row finds, at least.
    n_computed: u32,
    /// KV of which the outcomes are known.
    n_valid: u32,
    /// Its rows that are planned and have no outcome yet.
    n_in_flight: u32,
    /// Tokens with which it ends at the latest.
    n_end: u32,
    /// Planned steps in a row in which it ran and the budget left no row for it.
    n_starved: u32,
    /// How many ran when that began.
    n_rivals: usize,
}

/// Steps by what they do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StepKinds {
    pub(crate) n_decode: u64,
    pub(crate) n_prefill: u64,
    pub(crate) n_mixed: u64,
}

/// What plans and outcomes have said so far.
#[derive(Debug)]
pub(crate) struct Trace {
    rules: Rules,
    requests: BTreeMap<RequestId, Traced>,
    pub(crate) kinds: StepKinds,
    pub(crate) n_steps: u64,
    pub(crate) n_preemptions: u64,
    /// Those of requests with a row in flight.
    pub(crate) n_preemptions_in_flight: u64,
    /// Tokens queried, drafts apart.
    n_computed: u64,
    /// Longest time that the budget left a running request without a row, in planned steps.
    pub(crate) max_starved: u32,
}

impl Traced {
    fn runs(&self) -> bool {
        matches!(self.place, Place::Running(_))
    }

    fn waits(&self) -> bool {
        matches!(self.place, Place::Waiting | Place::Preempted)
    }

    /// Whether its next row queries one known token.
    fn is_output(&self) -> bool {
        self.n_computed + 1 >= self.n_tokens
    }

    /// Whether its newest token is in flight.
    fn has_token_in_flight(&self) -> bool {
        self.n_in_flight > 0 && self.n_computed >= self.n_tokens
    }

    /// Whether the row in flight surely is its last one, or has to come back first.
    fn has_no_next_row(&self) -> bool {
        self.has_token_in_flight() && (self.is_guided || self.n_tokens + 1 >= self.n_end)
    }
}

impl Trace {
    pub(crate) fn new(rules: Rules) -> Self {
        Self {
            rules,
            requests: BTreeMap::new(),
            kinds: StepKinds::default(),
            n_steps: 0,
            n_preemptions: 0,
            n_preemptions_in_flight: 0,
            n_computed: 0,
            max_starved: 0,
        }
    }

    /// Follows request `id`, accepted as `request` or as a sibling of it. Its draft layers' KV
    /// depends on `n_lookahead` tokens behind.
    pub(crate) fn submit(
        &mut self,
        id: RequestId,
        request: &Request,
        rank: Rank,
        n_lookahead: u32,
    ) {
        let n_prompt = u32::try_from(request.prompt.len()).expect("a prompt is short");
        let traced = Traced {
            rank,
            place: Place::Waiting,
            leader: (id != request.id).then_some(request.id),
            is_guided: request.guide.is_some(),
            n_prompt,
            n_unshared: n_lookahead.max(1),
            n_tokens: n_prompt,
            n_prefill: 0,
            was_preempted: false,
            n_computed: 0,
            n_valid: 0,
            n_in_flight: 0,
            n_end: n_prompt.saturating_add(request.params.max_tokens).min(self.rules.max_model_len),
            n_starved: 0,
            n_rivals: 0,
        };
        assert!(self.requests.insert(id, traced).is_none());
    }

    pub(crate) fn end(&mut self, id: RequestId) {
        self.of(id).place = Place::Ended;
    }

    fn of(&mut self, id: RequestId) -> &mut Traced {
        self.requests.get_mut(&id).expect("only accepted requests are planned")
    }

    fn count(&self, is: impl Fn(&Traced) -> bool) -> usize {
        self.requests.values().filter(|traced| is(traced)).count()
    }

    /// Enters a plan that was made while `in_flight` was, and returns the requests that start or
    /// come back in it, and whether they share a sibling's blocks. `n_preempted` requests lost
    /// their blocks for it, and `n_available` blocks are left.
    pub(crate) fn plan(
        &mut self,
        plan: &StepPlan,
        in_flight: Option<&StepPlan>,
        n_preempted: u64,
        n_available: u32,
    ) -> Vec<(RequestId, bool)> {
        self.rules.check(plan);
        let is_new = |row: &PlanRow| {
            plan.table_updates().any(|update| update.slot == row.table.slot && update.start == 0)
        };
        let (new, old): (Vec<_>, Vec<_>) = plan.rows().iter().partition(|row| is_new(row));
        self.preempt(&old, &new, n_preempted);
        self.check_admissions(&new);
        let mut started = vec![];
        for row in &new {
            started.push((row.request_id, self.is_shared(row)));
            let traced = self.of(row.request_id);
            assert_eq!(row.source, TokenSource::Host, "{}: starts in flight", row.request_id);
            assert_eq!(traced.n_in_flight, 0, "{}: is back too early", row.request_id);
            traced.place = Place::Running(row.table.slot);
            (traced.n_computed, traced.n_valid) = (row.n_computed, row.n_computed);
            traced.n_prefill = traced.n_tokens;
        }
        for row in &old {
            self.check_continued(row, in_flight);
        }
        for row in plan.rows() {
            let traced = self.of(row.request_id);
            let n_known = row.n_query - row.n_draft;
            traced.n_in_flight += 1;
            assert_eq!(row.prefill, row.n_computed < traced.n_prefill, "{}", row.request_id);
            traced.n_computed += n_known;
            self.n_computed += u64::from(n_known);
        }
        self.check_idle(plan, !new.is_empty(), n_available);
        self.n_steps += 1;
        self.count_kind(plan);
        started
    }

    /// Who runs and has no row: nobody starts meanwhile, and it has its turn soon.
    fn check_idle(&mut self, plan: &StepPlan, some_start: bool, n_available: u32) {
        let has_row: HashSet<_> = plan.rows().iter().map(|row| row.request_id).collect();
        let n_running = self.count(Traced::runs);
        for (id, traced) in &mut self.requests {
            if !traced.runs() || has_row.contains(id) || traced.has_no_next_row() {
                traced.n_starved = 0;
                continue;
            }
            assert!(!some_start, "{id} has no row, but others start");
            let is_starved = self.rules.is_starved(plan, traced.is_output(), n_available);
            traced.n_starved = if is_starved { traced.n_starved + 1 } else { 0 };
            self.max_starved = self.max_starved.max(traced.n_starved);
            if traced.n_starved <= 1 {
                traced.n_rivals = n_running;
            }
            // Each step begins with those that the one before left without a row.
            assert!((traced.n_starved as usize) < traced.n_rivals, "{id} starves");
        }
    }

    /// Enters that nothing could be launched, but `n_preempted` requests have lost their blocks.
    pub(crate) fn wait(&mut self, n_preempted: u64) {
        self.preempt(&[], &[], n_preempted);
    }

    /// Whether a row that starts a request reads a sibling's KV; it does where the sibling has it.
    fn is_shared(&self, row: &PlanRow) -> bool {
        let traced = &self.requests[&row.request_id];
        let Some(leader) = traced.leader.map(|id| &self.requests[&id]) else { return false };
        let n_shared = traced.n_prompt.saturating_sub(traced.n_unshared);
        let is_there = leader.runs() && leader.n_valid >= n_shared;
        if traced.was_preempted || !is_there || n_shared == 0 {
            return false;
        }
        assert_eq!(row.n_computed, n_shared, "{}: shares the prompt", row.request_id);
        true
    }

    /// Who loses its blocks: those of the greatest rank among the running ones that have no row, or
    /// that got them back in this very plan.
    fn preempt(&mut self, old: &[&PlanRow], new: &[&PlanRow], n_preempted: u64) {
        let has_row: HashSet<_> = old.iter().map(|row| row.request_id).collect();
        let is_candidate =
            |(id, traced): &(&RequestId, &mut Traced)| traced.runs() && !has_row.contains(id);
        let mut candidates: Vec<_> = self.requests.iter_mut().filter(is_candidate).collect();
        candidates.sort_by_key(|(_, traced)| std::cmp::Reverse(traced.rank));
        let n_preempted = usize::try_from(n_preempted).expect("a count of requests");
        assert!(n_preempted <= candidates.len(), "the preempted ones have no rows");
        for (_, traced) in &mut candidates[..n_preempted] {
            traced.place = Place::Preempted;
            traced.was_preempted = true;
            self.n_preemptions += 1;
            self.n_preemptions_in_flight += u64::from(traced.n_in_flight > 0);
        }
        for row in new {
            let traced = self.of(row.request_id);
            assert!(traced.waits(), "{}: starts and is {:?}", row.request_id, traced.place);
        }
    }

    /// Requests start and come back in the order of their ranks.
    fn check_admissions(&mut self, new: &[&PlanRow]) {
        let ranks: Vec<_> = new.iter().map(|row| self.of(row.request_id).rank).collect();
        assert!(ranks.is_sorted(), "requests start in the order of their ranks");
        let Some(last) = ranks.last() else { return };
        let is_new: HashSet<_> = new.iter().map(|row| row.request_id).collect();
        for (id, traced) in &self.requests {
            let is_first = traced.waits() && traced.n_in_flight == 0 && traced.rank < *last;
            let may_start = is_first && self.has_prompt(traced);
            assert!(!may_start || is_new.contains(id), "{id} is passed over");
            let is_early = is_new.contains(id) && !self.has_prompt(traced);
            assert!(!is_early, "{id} starts before the prompt is computed");
        }
    }

    /// Whether the sibling that a request waits for has computed the prompt, or ended.
    fn has_prompt(&self, traced: &Traced) -> bool {
        let leader = traced.leader.map(|id| &self.requests[&id]);
        leader
            .is_none_or(|leader| leader.place == Place::Ended || leader.n_tokens > leader.n_prompt)
    }

    /// A row goes on where the ones before have led.
    fn check_continued(&mut self, row: &PlanRow, in_flight: Option<&StepPlan>) {
        let id = row.request_id;
        let traced = self.of(id);
        assert_eq!(traced.place, Place::Running(row.table.slot), "{id}: the table is its own");
        assert_eq!(row.n_computed, traced.n_computed, "{id}: goes on where it was");
        let rows = in_flight.map_or(&[][..], StepPlan::rows);
        let before = rows.iter().enumerate().find(|(_, before)| before.request_id == id);
        let before = before.filter(|(_, before)| before.samples);
        match (row.source, before) {
            (TokenSource::Host, None) => {}
            (TokenSource::InFlight { row: source }, Some((row_idx, before))) => {
                assert_eq!(source as usize, row_idx, "{id}: continues its own row");
                assert!(row.n_draft <= before.n_propose, "{id}: verifies what is proposed");
                assert!(!traced.has_no_next_row(), "{id}: a row behind its last one");
            }
            (source, _) => panic!("{id}: its tokens are not where {source:?} says"),
        }
    }

    fn count_kind(&mut self, plan: &StepPlan) {
        let n_outputs = plan.rows().iter().filter(|row| !row.prefill).count();
        *match (n_outputs, plan.rows().len() - n_outputs) {
            (_, 0) => &mut self.kinds.n_decode,
            (0, _) => &mut self.kinds.n_prefill,
            _ => &mut self.kinds.n_mixed,
        } += 1;
    }

    /// Enters the outcome of a plan, and checks that the events are what it says of the requests
    /// that have not ended, in the order of the rows.
    pub(crate) fn apply(
        &mut self,
        plan: &StepPlan,
        outcome: &StepOutcome,
        events: &[RequestEvent],
    ) {
        let mut failed = vec![];
        let mut runs = events.iter().filter_map(|event| match event {
            RequestEvent::Tokens(event) => Some(event),
            _ => None,
        });
        for row in plan.rows() {
            let traced = self.of(row.request_id);
            traced.n_in_flight -= 1;
            if traced.place == Place::Ended {
                continue;
            }
            let answer = outcome.row(row.request_id).expect("every row has an answer");
            if let Some(why) = outcome.failure(answer) {
                failed.push((row.request_id, FinishReason::Failed(why.to_owned())));
                continue;
            }
            traced.n_valid += row.n_query - row.n_draft;
            if !row.samples {
                continue;
            }
            let event = runs.next().expect("a row's tokens are streamed");
            check_run(row, (outcome, answer), event);
            traced.n_tokens += event.n_accepted + 1;
            if traced.runs() {
                traced.n_computed += event.n_accepted;
                traced.n_valid += event.n_accepted;
            }
        }
        assert_eq!(runs.next(), None, "only rows have tokens");
        let from_outside = events.iter().filter_map(|event| match event {
            RequestEvent::Finished { request_id, reason, .. } if is_from_outside(reason) => {
                Some((*request_id, reason.clone()))
            }
            _ => None,
        });
        assert!(from_outside.eq(failed), "an outcome fails those whose rows failed");
    }

    /// Enters that a step failed: its requests end, and nobody else.
    pub(crate) fn fail(&mut self, plan: &StepPlan, events: &[RequestEvent]) {
        let mut ended: Vec<_> = events.iter().map(RequestEvent::request_id).collect();
        ended.sort();
        let mut expected = vec![];
        for row in plan.rows() {
            let traced = self.of(row.request_id);
            traced.n_in_flight -= 1;
            if traced.place != Place::Ended {
                expected.push(row.request_id);
            }
        }
        expected.sort();
        assert_eq!(ended, expected, "a failed step ends its requests");
    }

    /// Checks what the scheduler counts.
    pub(crate) fn check(&self, stats: &SchedulerStats) {
        assert_eq!(stats.n_running, self.count(Traced::runs), "who runs");
        assert_eq!(stats.n_waiting, self.count(Traced::waits), "who waits");
        let n_preempted = self.count(|traced| traced.place == Place::Preempted);
        assert_eq!(stats.n_preempted, n_preempted, "who waits to come back");
        assert_eq!(stats.n_computed_tokens, self.n_computed, "computed tokens");
        let StepKinds { n_decode, n_prefill, n_mixed } = self.kinds;
        assert_eq!(stats.n_decode_steps, n_decode, "decode steps");
        assert_eq!(stats.n_prefill_steps, n_prefill, "prefill steps");
        assert_eq!(stats.n_mixed_steps, n_mixed, "mixed steps");
        assert_eq!(stats.n_preemptions, self.n_preemptions, "preemptions");
    }
}

/// What is streamed is the front of the row's run.
fn check_run(row: &PlanRow, (outcome, answer): (&StepOutcome, &OutcomeRow), event: &TokensEvent) {
    let id = row.request_id;
    assert_eq!(event.request_id, id, "events come in the order of the rows");
    assert!(outcome.tokens(answer).starts_with(&event.tokens), "{id}: streams its row's run");
    assert_eq!(event.drafts.len(), row.n_draft as usize, "{id}: the drafts of its row");
    let n_kept = event.tokens.len();
    assert_eq!(event.n_accepted as usize, (answer.n_accepted as usize).min(n_kept - 1), "{id}");
}
