//! What must hold of the events of a run.

use std::collections::BTreeMap;

use engine_types::{
    FinishReason, PlanRow, Request, RequestEvent, RequestId, SpecDecodeStats, StepPlan, TokenId,
    TokenSource, TokensEvent,
};

use crate::oracle::{Expected, SerialDrafter};

/// An accepted request and what came of it so far.
#[derive(Debug)]
struct Client {
    prompt: Vec<TokenId>,
    expected: Expected,
    /// What must be drafted, where that depends on the committed tokens alone.
    drafter: Option<SerialDrafter>,
    /// How many tokens had KV in its first row, once it has had one.
    n_cached: Option<u32>,
    has_started: bool,
    tokens: Vec<TokenId>,
    spec_decode: SpecDecodeStats,
    reason: Option<FinishReason>,
}

/// Reads the events of all requests.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    clients: BTreeMap<RequestId, Client>,
    pub(crate) spec_decode: SpecDecodeStats,
    pub(crate) n_tokens: u64,
    pub(crate) n_prompt_tokens: u64,
    pub(crate) n_started_prompt_tokens: u64,
    pub(crate) n_cached_tokens: u64,
    /// Prompt tokens that siblings computed.
    pub(crate) n_shared_tokens: u64,
    pub(crate) n_finished: usize,
}

impl Ledger {
    /// Follows request `id`, accepted as `request` or as a sibling of it, and what it must yield.
    pub(crate) fn accept(
        &mut self,
        id: RequestId,
        request: &Request,
        expected: Expected,
        mut drafter: Option<SerialDrafter>,
    ) {
        if let Some(drafter) = &mut drafter {
            request.prompt.iter().for_each(|token| drafter.push(*token));
        }
        let client = Client {
            prompt: request.prompt.clone(),
            expected,
            drafter,
            n_cached: None,
            has_started: false,
            tokens: vec![],
            spec_decode: SpecDecodeStats::default(),
            reason: None,
        };
        self.n_prompt_tokens += request.prompt.len() as u64;
        assert!(self.clients.insert(id, client).is_none(), "{id} is accepted twice");
    }

    /// Notes that a request starts with `n_computed` tokens of KV, of a sibling or else from the
    /// prefix cache.
    pub(crate) fn start(&mut self, id: RequestId, n_computed: u32, is_shared: bool) {
        let client = self.clients.get_mut(&id).expect("only accepted requests start");
        assert!(client.has_started, "a request starts with its first row");
        if client.n_cached.is_none() {
            client.n_cached = Some(n_computed);
            if is_shared {
                self.n_shared_tokens += u64::from(n_computed);
            } else {
                self.n_cached_tokens += u64::from(n_computed);
                self.n_started_prompt_tokens += client.prompt.len() as u64;
            }
        }
    }

    /// Checks that a row's known tokens are the request's, and nothing else.
    pub(crate) fn check_row(&self, plan: &StepPlan, row: &PlanRow) {
        if row.source != TokenSource::Host {
            return;
        }
        let client = &self.clients[&row.request_id];
        let tokens = plan.tokens(row);
        let known = &tokens[..tokens.len() - row.n_draft as usize];
        let mut own = client.prompt.iter().chain(&client.tokens).skip(row.n_computed as usize);
        let mut queried = known.iter().chain(plan.lookahead(row));
        assert!(queried.all(|token| own.next() == Some(token)), "{}: its tokens", row.request_id);
    }

    pub(crate) fn len(&self) -> usize {
        self.clients.len()
    }

    pub(crate) fn n_unfinished(&self) -> usize {
        self.clients.len() - self.n_finished
    }

    pub(crate) fn is_unfinished(&self, id: RequestId) -> bool {
        self.clients.get(&id).is_some_and(|client| client.reason.is_none())
    }

    pub(crate) fn read(&mut self, event: RequestEvent) {
        let id = event.request_id();
        let client = self.clients.get_mut(&id).expect("only accepted requests have events");
        assert!(client.reason.is_none(), "{id}: an event after the last one");
        match event {
            RequestEvent::Started { .. } => {
                assert!(!client.has_started, "{id}: starts again");
                client.has_started = true;
            }
            RequestEvent::Tokens(event) => {
                assert!(client.has_started, "{id}: tokens before its start");
                client.read_tokens(&event);
                self.spec_decode.record_step(event.drafts.len(), event.n_accepted as usize);
                self.n_tokens += event.tokens.len() as u64;
            }
            RequestEvent::Finished { reason, usage, spec_decode, .. } => {
                assert_eq!(usage.prompt_tokens as usize, client.prompt.len());
                assert_eq!(usage.completion_tokens as usize, client.tokens.len(), "{id}");
                assert_eq!(usage.cached_tokens, client.n_cached.unwrap_or(0), "{id}: cached");
                assert_eq!(*spec_decode, client.spec_decode, "{id}: drafting counts");
                if !is_from_outside(&reason) {
                    assert_eq!(client.tokens, client.expected.tokens, "{id}: ends early");
                    assert_eq!(reason, client.expected.reason, "{id}: wrong reason");
                }
                client.reason = Some(reason);
                self.n_finished += 1;
            }
            event => panic!("an unknown event: {event:?}"),
        }
    }
}

impl Client {
    fn read_tokens(&mut self, event: &TokensEvent) {
        let (id, n_accepted) = (event.request_id, event.n_accepted as usize);
        assert_eq!(n_accepted, event.tokens.len() - 1, "{id}: run and count");
        assert_eq!(event.tokens[..n_accepted], event.drafts[..n_accepted]);
        self.spec_decode.record_step(event.drafts.len(), n_accepted);
        if let Some(drafter) = &mut self.drafter {
            let expected = drafter.drafts(event.drafts.len());
            assert_eq!(event.drafts[..], expected, "{id}: the drafts differ");
            event.tokens.iter().for_each(|token| drafter.push(*token));
        }
        self.tokens.extend(event.tokens);
        assert!(self.expected.tokens.starts_with(&self.tokens), "{id}: the text differs");
    }
}

/// Whether a request could end so anywhere.
pub(crate) fn is_from_outside(reason: &FinishReason) -> bool {
    matches!(
        reason,
        FinishReason::Aborted | FinishReason::DeadlineExceeded | FinishReason::Failed(_)
    )
}
