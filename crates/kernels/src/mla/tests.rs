//! Tests of latent attention.
