//! Each request's way through the plans and outcomes of a run, and the statistics that follow from
//! it: what the scheduler says of itself must be the same.

use std::collections::{BTreeMap, HashSet};

use engine_types::{
    PlanRow, RequestEvent, RequestId, StepOutcome, StepPlan, TokenSource, TokensEvent,
};
use scheduler::SchedulerStats;

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
    /// KV that its next row finds, at least.
    n_computed: u32,
    /// Its rows that are planned and have no outcome yet.
    n_in_flight: u32,
    /// Planned steps without a row of it while it runs.
    n_idle: u32,
}

/// Steps by what they do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StepKinds {
    pub(crate) n_decode: u64,
    pub(crate) n_prefill: u64,
    pub(crate) n_mixed: u64,
}

/// What plans and outcomes have said so far.
#[derive(Debug, Default)]
pub(crate) struct Trace {
    requests: BTreeMap<RequestId, Traced>,
    pub(crate) kinds: StepKinds,
    pub(crate) n_steps: u64,
    pub(crate) n_preemptions: u64,
    /// Longest time that a running request went without a row, in planned steps.
    pub(crate) max_idle: u32,
}

impl Trace {
    pub(crate) fn submit(&mut self, id: RequestId, rank: Rank) {
        let place = Place::Waiting;
        let traced = Traced { rank, place, n_computed: 0, n_in_flight: 0, n_idle: 0 };
        assert!(self.requests.insert(id, traced).is_none());
    }

    pub(crate) fn end(&mut self, id: RequestId) {
        self.of(id).place = Place::Ended;
    }

    fn of(&mut self, id: RequestId) -> &mut Traced {
        self.requests.get_mut(&id).expect("only accepted requests are planned")
    }

    /// Requests that run and that wait.
    pub(crate) fn n_running_and_waiting(&self) -> (usize, usize) {
        let count = |is: fn(&Place) -> bool| {
            self.requests.values().filter(|traced| is(&traced.place)).count()
        };
        let n_running = count(|place| matches!(place, Place::Running(_)));
        (n_running, count(|place| matches!(place, Place::Waiting | Place::Preempted)))
    }

    /// Enters a plan that was made while `in_flight` was, and returns the requests that start or
    /// come back in it. `n_preempted` requests lost their blocks for it.
    pub(crate) fn plan(
        &mut self,
        plan: &StepPlan,
        in_flight: Option<&StepPlan>,
        n_preempted: u64,
    ) -> Vec<RequestId> {
        let is_new = |row: &PlanRow| {
            plan.table_updates().any(|update| update.slot == row.table.slot && update.start == 0)
        };
        let (new, old): (Vec<_>, Vec<_>) = plan.rows().iter().partition(|row| is_new(row));
        self.preempt(&old, &new, n_preempted);
        self.check_admissions(&new);
        for row in &new {
            let traced = self.of(row.request_id);
            assert_eq!(row.source, TokenSource::Host, "{}: starts in flight", row.request_id);
            assert_eq!(traced.n_in_flight, 0, "{}: is back too early", row.request_id);
            traced.place = Place::Running(row.table.slot);
            traced.n_computed = row.n_computed;
        }
        for row in &old {
            self.check_continued(row, in_flight);
        }
        for row in plan.rows() {
            let traced = self.of(row.request_id);
            traced.n_in_flight += 1;
            traced.n_computed += row.n_query - row.n_draft;
        }
        let has_row: HashSet<_> = plan.rows().iter().map(|row| row.request_id).collect();
        for (id, traced) in &mut self.requests {
            let is_idle = matches!(traced.place, Place::Running(_)) && !has_row.contains(id);
            traced.n_idle = if is_idle { traced.n_idle + 1 } else { 0 };
            self.max_idle = self.max_idle.max(traced.n_idle);
        }
        self.n_steps += 1;
        self.count_kind(&old, plan.rows().len());
        new.iter().map(|row| row.request_id).collect()
    }

    /// Who loses its blocks: those of the greatest rank among the running ones that have no row, or
    /// that got them back in this very plan.
    fn preempt(&mut self, old: &[&PlanRow], new: &[&PlanRow], n_preempted: u64) {
        let has_row: HashSet<_> = old.iter().map(|row| row.request_id).collect();
        let is_candidate = |(id, traced): &(&RequestId, &mut Traced)| {
            matches!(traced.place, Place::Running(_)) && !has_row.contains(id)
        };
        let mut candidates: Vec<_> = self.requests.iter_mut().filter(is_candidate).collect();
        candidates.sort_by_key(|(_, traced)| std::cmp::Reverse(traced.rank));
        let n_preempted = usize::try_from(n_preempted).expect("a count of requests");
        assert!(n_preempted <= candidates.len(), "the preempted ones have no rows");
        for (_, traced) in &mut candidates[..n_preempted] {
            traced.place = Place::Preempted;
            self.n_preemptions += 1;
        }
        for row in new {
            let place = self.of(row.request_id).place;
            let waits = matches!(place, Place::Waiting | Place::Preempted);
            assert!(waits, "{}: starts while it is {place:?}", row.request_id);
        }
    }

    /// Requests start and come back in the order of their ranks.
    fn check_admissions(&mut self, new: &[&PlanRow]) {
        let ranks: Vec<_> = new.iter().map(|row| self.of(row.request_id).rank).collect();
        assert!(ranks.is_sorted(), "requests start in the order of their ranks");
        let Some(last) = ranks.last() else { return };
        let is_new: HashSet<_> = new.iter().map(|row| row.request_id).collect();
        for (id, traced) in &self.requests {
            let waits = matches!(traced.place, Place::Waiting | Place::Preempted);
            let is_first = waits && traced.n_in_flight == 0 && traced.rank < *last;
            assert!(id.0 >= 1000 || !is_first || is_new.contains(id), "{id} is passed over");
        }
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
            }
            (source, _) => panic!("{id}: its tokens are not where {source:?} says"),
        }
    }

    fn count_kind(&mut self, old: &[&PlanRow], n_rows: usize) {
        let n_outputs = old.iter().filter(|row| !row.prefill).count();
        *match (n_outputs, n_rows - n_outputs) {
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
        let mut runs = events.iter().filter_map(|event| match event {
            RequestEvent::Tokens(event) => Some(event),
            _ => None,
        });
        for row in plan.rows() {
            let traced = self.of(row.request_id);
            traced.n_in_flight -= 1;
            if !row.samples || traced.place == Place::Ended {
                continue;
            }
            let event = runs.next().expect("a row's tokens are streamed");
            check_run(row, outcome, event);
            if matches!(traced.place, Place::Running(_)) {
                traced.n_computed += event.n_accepted;
            }
        }
        assert_eq!(runs.next(), None, "only rows have tokens");
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
        let (n_running, n_waiting) = self.n_running_and_waiting();
        assert_eq!((stats.n_running, stats.n_waiting), (n_running, n_waiting), "who runs");
        let StepKinds { n_decode, n_prefill, n_mixed } = self.kinds;
        assert_eq!(stats.n_decode_steps, n_decode, "decode steps");
        assert_eq!(stats.n_prefill_steps, n_prefill, "prefill steps");
        assert_eq!(stats.n_mixed_steps, n_mixed, "mixed steps");
        assert_eq!(stats.n_preemptions, self.n_preemptions, "preemptions");
    }
}

/// What is streamed is the front of the row's run.
fn check_run(row: &PlanRow, outcome: &StepOutcome, event: &TokensEvent) {
    let id = row.request_id;
    assert_eq!(event.request_id, id, "events come in the order of the rows");
    let answer = outcome.row(id).expect("every row has an answer");
    assert!(outcome.tokens(answer).starts_with(&event.tokens), "{id}: streams its row's run");
    assert_eq!(event.drafts.len(), row.n_draft as usize, "{id}: the drafts of its row");
    let n_kept = event.tokens.len();
    assert_eq!(event.n_accepted as usize, (answer.n_accepted as usize).min(n_kept - 1), "{id}");
}
