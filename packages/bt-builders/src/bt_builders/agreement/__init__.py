"""How a group's backends agree on one layout, and how its builders are made from it."""
