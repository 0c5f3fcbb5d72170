//! KV tensors, input staging and the step executor of the device plane.
