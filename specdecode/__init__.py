"""One speculative step, installed as `hybrid_runtime.specdecode`: verify, accept, keep the state
right, draft again.

- `runner`: the step; `frame`: what its launches read and write.
- `reference`: the same step on one page of plain torch, an oracle for tests.
- `acceptance`, `sampling`: which drafts are accepted, and what is sampled instead.
- `drafter`, `ngram`: who proposes them.
- `sequences`: tokens, lengths and drafts of every slot, on the device.
"""
