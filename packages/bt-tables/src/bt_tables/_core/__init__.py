"""What both tables are made of; nothing in here is public."""
