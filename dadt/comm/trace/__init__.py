"""The timeline: recording, aligning clocks, merging."""
