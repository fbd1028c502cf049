"""One speculative step, installed as `hybrid_runtime.specdecode`: verify, accept, keep the state
right, draft again.

- `runner`: the step; `shape`: its rows and tokens, padded to few; `phases`: what it launches;
  `frame`: what these read and write; `capture`: which of them are CUDA graphs.
- `reference`: the same step on one page of plain torch, an oracle for tests.
- `acceptance`, `sampling`: which drafts are accepted, and what is sampled instead.
- `drafter`, `ngram`: who proposes them.
- `sequences`, `logit_tables`: tokens, lengths, drafts and sampling of every slot, on the device.
"""
