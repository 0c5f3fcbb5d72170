//! Hash language model, workloads and checkers that run the control plane without tensors.
