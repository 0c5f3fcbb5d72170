//! Linear, norm, rotary embedding, dense and expert feed-forward layers.
