"""Reading what a job leaves: the page, its progress, its timeline."""
