"""A run as one page that opens without a network: curves over the steps, and the summary."""
