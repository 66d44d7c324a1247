"""Takes snapshots of an unmodified script and resumes from them: to resume, the script runs again from its beginning up
to the snapshot, without its expensive parts."""
