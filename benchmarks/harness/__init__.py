"""What the benchmarks share: machine facts, interleaved timing, models, contestants, results."""
