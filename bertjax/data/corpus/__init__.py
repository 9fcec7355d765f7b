"""From text to a tokenised corpus: once, offline, streaming."""
