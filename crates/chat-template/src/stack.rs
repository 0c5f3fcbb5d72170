//! Room on the stack. The template engine reads chains of operators, and drops and writes values in
//! values, by recursion, as deep as a template of the allowed size and steps can nest them.

use std::{panic, thread};

use crate::ChatTemplateError;

/// Over twice what the deepest values take. It costs addresses, and memory only where it is used.
const STACK_BYTES: usize = 1 << 30;

/// Works on a stack of [`STACK_BYTES`].
///
/// # Errors
///
/// Those of the work; [`ChatTemplateError::Stack`] if the system has no such stack.
pub(crate) fn with_room<T: Send>(
    work: impl FnOnce() -> Result<T, ChatTemplateError> + Send,
) -> Result<T, ChatTemplateError> {
    thread::scope(|scope| {
        let builder = thread::Builder::new().name("chat-template".into()).stack_size(STACK_BYTES);
        let worker = builder.spawn_scoped(scope, work).map_err(ChatTemplateError::Stack)?;
        worker.join().unwrap_or_else(|fault| panic::resume_unwind(fault))
    })
}
