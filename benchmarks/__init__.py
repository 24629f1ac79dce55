"""Performance: `make bench`. Timings are for reading; no test depends on them."""
