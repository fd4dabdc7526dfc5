"""What published models keep in their caches, read from their configs."""
