//! Paged MLA attention behind one trait: plain reference and fused CPU.
