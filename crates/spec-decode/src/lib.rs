//! Draft proposal and rejection sampling, for any model that can take a draft step.
