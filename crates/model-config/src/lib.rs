//! Hugging Face config.json to a validated, typed configuration.
