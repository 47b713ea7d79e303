"""The microbenchmarks; installed as kvpage.benchmarks, run by `kvpage bench`."""
