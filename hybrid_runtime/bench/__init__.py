"""Inter-token latency: what `hybrid-runtime bench` and `benchmarks/engine/itl.py` measure."""
