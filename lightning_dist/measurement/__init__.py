"""Time and bytes of codecs and exchanges: clocks, microbenchmarks, what a step will send."""
