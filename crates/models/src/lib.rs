//! DeepSeek-V3 class models and their MTP layers.
