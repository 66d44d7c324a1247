"""What a job leaves to read: the page, its progress, its timeline."""
