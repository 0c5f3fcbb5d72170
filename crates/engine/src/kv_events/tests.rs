//! Subscribers of the prefix cache's events.
