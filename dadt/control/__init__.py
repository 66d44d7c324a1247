"""Code that all processes of a job share: message frames, connections, and facts about the host. Does not import
torch."""
