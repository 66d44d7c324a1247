"""Takes snapshots of an unmodified script and resumes from them: the script runs again up to the snapshot, without its
expensive parts."""
