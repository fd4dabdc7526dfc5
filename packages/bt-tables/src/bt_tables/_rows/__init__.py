"""What the host knows of rows and of the batch; nothing is public."""
