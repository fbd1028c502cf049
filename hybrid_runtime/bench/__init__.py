"""Inter-token latency: what `hybrid-runtime bench` and `benchmarks/itl.py` measure."""
