"""What published models keep in their caches, and the tables that follow from it."""
