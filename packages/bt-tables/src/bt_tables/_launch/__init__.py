"""How a step gets to the device: its packet, its memory, its launch; nothing is public."""
