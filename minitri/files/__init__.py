"""Files on disk and hub: checkpoints, tokenizers, snapshots and the store of K and V."""
