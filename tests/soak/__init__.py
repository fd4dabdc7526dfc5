"""Random traffic over random scenarios for minutes or hours, every step checked."""
