"""Time and bytes of codecs and exchanges: clocks, microbenchmarks, expected traffic."""
