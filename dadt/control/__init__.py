"""What every process of a job shares: frames, the connection to the agent, facts about the host. No torch."""
