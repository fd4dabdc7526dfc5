"""Random traffic over random surroundings for minutes or hours, every step checked."""
