"""Speed, measured: each module is one command, prints one JSON line a row and writes one file. `benchmarks.run` runs
all."""
