"""The timeline of a job: recording, aligning the ranks' clocks, and merging their parts."""
