"""Code that every process of a job uses: frames, connections, facts about the host. Imports no torch."""
