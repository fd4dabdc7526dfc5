"""What the commands share: options, a file of prompts, a bar, one thread."""
